"""What there is to run on a GPU, in pieces of a few minutes that stand alone, and how one of them is run."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["SECONDS", "STAGES", "Stage", "chosen", "run"]

SECONDS = 470.0
"""The most that a stage may take; what it has written by then stays."""

_TAIL = 6000  # characters of output that a record keeps


@dataclass(frozen=True)
class Stage:
    """`arguments`: of Python; {output} stands for the folder that results go to. `needs`: modules without which the
    stage is skipped. `gpus`: how many it takes at least."""

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()
    gpus: int = 1

    def lacks(self, gpus: int) -> list[str]:
        """What it needs and this machine does not have."""
        lacking = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return lacking if gpus >= self.gpus else [*lacking, f"{self.gpus} GPUs, there are {gpus}"]


def _tests(name: str, *needs: str, gpus: int = 1, file: str | None = None) -> Stage:
    # Without the project's options: plugins that they speak of may be missing.
    where = f"tests/gpu/test_{file or name}.py"
    return Stage(f"test_{name}", ("-m", "pytest", "-o", "addopts=", "-q", where), ("pytest", *needs), gpus)


STAGES = (
    _tests("host_waits"),
    _tests("comm"),
    _tests("kernels", "cupy", "hypothesis"),
    _tests("optimizers", "cupy", "pydantic"),
    _tests("engine", "pydantic"),
    _tests("several_processes", "pydantic"),
    _tests("sparse_attention", "triton"),
    Stage("train_bert", ("-m", "experiments.gpu.training", "--output", "{output}/train_bert.json"), ("cupy",)),
    Stage(
        "bench_kernels",
        ("-m", "experiments.benchmarks.kernels", "--device", "cuda", "--output", "{output}/kernels.json"),
        ("cupy",),
    ),
    Stage("bench_attention", ("-m", "experiments.benchmarks.attention_gpu"), ("triton",)),
)


def run(stage: Stage, output: Path, gpus: int, seconds: float = SECONDS) -> dict[str, Any]:
    """Run one stage and say what became of it: passed, failed, skipped or out of time, with the end of its output."""
    command = [sys.executable, *(part.format(output=output) for part in stage.arguments)]
    record: dict[str, Any] = {"stage": stage.name, "command": command[1:], "lacks": stage.lacks(gpus)}
    if record["lacks"]:
        return record | {"status": "skipped"}
    started = time.monotonic()
    log = output / f"{stage.name}.log"
    with log.open("w") as file:
        # A group of its own, so that ranks which it has started end with it.
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = "passed" if process.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            _end(process)
    tail = log.read_text(errors="replace")[-_TAIL:]
    return record | {"status": status, "seconds": round(time.monotonic() - started, 1), "output": tail.splitlines()}


def chosen(names: Sequence[str]) -> list[Stage]:
    """The stages of these names, or all."""
    return [stage for stage in STAGES if not names or stage.name in names]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
