"""Runs a training script on one rank for some steps and takes its times: `thinwire plan --measure script.py`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from thinwire.plan.units import PlanError
from thinwire.plan.workload import Matrices, ParameterDtype, Transformer, Workload

__all__ = ["MeasuredSteps", "measure_script"]


@dataclass(frozen=True)
class MeasuredSteps:
    """Medians over `steps` steps on one rank, in seconds: `forward` and `backward` of one micro-batch, of which a step
    has `accumulation`, and `update` of the optimizer. `forward` holds all that is neither of the others, the loading of
    data too. `shapes`: of the parameters that the optimizer moves, in its order."""

    script: str
    steps: int
    forward: float
    backward: float
    update: float
    accumulation: int
    dtype: ParameterDtype
    shapes: tuple[tuple[int, ...], ...]

    def workload(self, model: Transformer | None = None) -> Workload:
        """Of the script's own model, unless another is given. The optimizer's time counts as AdamW's."""
        found = self.model() if model is None else model
        return Workload(found, self.forward, self.backward, self.accumulation, self.update, self.dtype)

    def model(self) -> Transformer:
        """By its parameters. The first is taken for an embedding, whose gradient comes last, if none is larger."""
        matrices = [Matrices(shape[0], prod(shape[1:])) for shape in self.shapes if len(shape) > 1 and 0 not in shape]
        total = sum(prod(list(shape)) for shape in self.shapes)
        first = self.shapes[0] if self.shapes else ()
        largest = max(matrices, key=lambda one: one.numel, default=None)
        last = (
            matrices[0] if len(first) == 2 and matrices and matrices[0].numel == getattr(largest, "numel", 0) else None
        )
        return Transformer(self.script, total, tuple(matrices), last)


_SKIPPED_STEPS = 3
"""Before those that are timed: memory is allocated, kernels compile."""
_LAST_LINES = 8


def measure_script(script: Path, steps: int, limit: float) -> MeasuredSteps:
    """Run `script` with this Python as one rank until it has made `steps` steps after the first three; then it is
    ended. What it prints goes to this process's stderr.

    Raises PlanError where the script fails, ends before, takes longer than `limit` seconds, or trains in a way that
    cannot be told apart into forward, backward and update.
    """
    if not script.is_file():
        raise PlanError(f"--measure {script}: there is no such file")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "steps.json"
        told = Path(folder) / "stderr.txt"
        wanted = [str(_SKIPPED_STEPS), str(steps), str(output)]
        command = [sys.executable, "-m", "thinwire.plan.measured_script", *wanted, str(script)]
        with told.open("w+") as errors:
            try:
                # The script's own output is no part of the answer, which goes to stdout.
                code = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno(),
                    stderr=errors,
                    env=_alone(),
                    timeout=limit,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                raise PlanError(
                    f"{script} did not make {_SKIPPED_STEPS + steps} steps in {limit:.0f} s: give --measure-limit a "
                    "longer time, or --measure-steps fewer steps"
                ) from None
        found = _read(output)
        if found is None:
            last = "\n".join(told.read_text(errors="replace").splitlines()[-_LAST_LINES:])
            raise PlanError(f"{script} ended with exit code {code} before it could be measured:\n{last}")
    if "problem" in found:
        raise PlanError(f"{script} cannot be measured: {found['problem']}")
    shapes = tuple(tuple(shape) for shape in found.pop("shapes"))
    return MeasuredSteps(script=script.name, shapes=shapes, **found)


def _read(output: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(output.read_text())
    except (OSError, ValueError):
        return None
    return found


def _alone() -> dict[str, str]:
    """The environment of a job of one rank, so that scripts for torchrun run as well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**os.environ, **job, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
