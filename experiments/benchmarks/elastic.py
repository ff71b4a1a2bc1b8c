"""What it costs that a step can be sent again: elastic 1-bit Adam beside the plain one, over Gloo, while nobody fails,
and what the survivors wait for when a worker goes.

Systems take turns of a few steps in one process group, so that whatever else the machine does hits them alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import thinwire
from experiments.common.command_line import Parser, positive
from experiments.common.launching import launch
from experiments.common.machine import describe
from experiments.common.results import OUTPUT, write_json
from experiments.tasks.batches import random_batch
from experiments.tasks.sizes import SIZES
from thinwire.comm import Communicator
from thinwire.comm.elastic import serve

__all__ = ["main", "measure"]

_STEPS_A_TURN = 4
_VOCABULARY, _LENGTH = 4096, 32

Batch = tuple[Tensor, Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, on the ranks it asks for or a launcher started; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch("experiments.benchmarks.elastic", _parse, measure, given, 3)


def measure(comm: Communicator, options: argparse.Namespace) -> None:
    """Writes how long steps take beside the plain optimizer's. Collective."""
    place = serve(f"127.0.0.1:{options.port}") if comm.rank == 0 else None
    comm.barrier()
    systems = {
        f"{kind}, {stage}": _System(options, comm, frozen=stage == "frozen", elastic=kind == "elastic")
        for stage in ("warmup", "frozen")
        for kind in ("plain", "elastic")
    }
    batches = [
        random_batch(options.batch_size, _LENGTH, _VOCABULARY, seed=comm.rank + 1000 * step) for step in range(4)
    ]
    times: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(options.rounds + 1):  # the first one compiles kernels, and freezes
        order = list(systems) if number % 2 else list(reversed(systems))
        for name in order:
            comm.barrier()
            start = time.perf_counter()
            for batch in batches[:_STEPS_A_TURN]:
                systems[name].step(batch)
            took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            comm.all_reduce(took, "max")
            if number:
                times[name].append(float(took) / _STEPS_A_TURN)
    pause = _pause(systems["elastic, frozen"], comm, batches[0])
    if comm.rank == 0:
        _report(comm, options, times, pause)
    comm.barrier()
    del place


class _System:
    """A model and its optimizer."""

    def __init__(self, options: argparse.Namespace, comm: Communicator, *, frozen: bool, elastic: bool) -> None:
        from experiments.tasks.models import build_bert

        self.model = build_bert(SIZES[options.model], _VOCABULARY, _LENGTH, 0.0, seed=0)
        settings: dict[str, Any] = {"freeze_step": 1 if frozen else 1_000_000, "lr": 1e-4}
        if elastic:
            job = thinwire.Elastic(comm.size, address=f"127.0.0.1:{options.port}", job=f"{frozen}")
            self.optimizer = thinwire.OneBitAdam(self.model.named_parameters(), elastic=job, **settings)
        else:
            self.optimizer = thinwire.OneBitAdam(self.model.named_parameters(), comm=comm, nodes="flat", **settings)

    def step(self, batch: Batch) -> None:
        total, count = self.model(*batch)
        (total / count).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _pause(system: _System, comm: Communicator, batch: Batch) -> float | None:
    """Seconds from when rank 0 notices that the last rank has gone to the end of the step that it was missed in."""
    if comm.size == 1:
        return None
    noticed: list[float] = []
    workers: Any = system.optimizer._home.workers  # type: ignore[attr-defined]
    meet: Callable[..., bool] = workers._meet

    def note(*given: Any) -> bool:
        noticed.append(time.perf_counter())
        return meet(*given)

    workers._meet = note
    if comm.rank == comm.size - 1:
        system.optimizer.close()
        comm.barrier()
        return None
    while not noticed:
        system.step(batch)
    found = time.perf_counter() - noticed[0]
    comm.barrier()
    return found


def _report(
    comm: Communicator, options: argparse.Namespace, times: dict[str, list[float]], pause: float | None
) -> None:
    rows: dict[str, dict[str, float]] = {}
    for stage in ("warmup", "frozen"):
        pairs = list(zip(times[f"plain, {stage}"], times[f"elastic, {stage}"], strict=True))
        ratios = sorted(elastic / plain for plain, elastic in pairs)
        plain, elastic = (1e3 * statistics.median(one) for one in zip(*pairs, strict=True))
        rows[stage] = {"plain ms": plain, "elastic ms": elastic, "median ratio": statistics.median(ratios)}
        print(f"{stage:<8} plain {plain:8.1f} ms, elastic {elastic:8.1f} ms, ratio {rows[stage]['median ratio']:.3f}")
    found: dict[str, Any] = {"model": options.model, "ranks": comm.size, "rounds": options.rounds, "steps": rows}
    if pause is not None:
        found["pause after a worker has gone, s"] = pause
        found["in frozen steps"] = 1e3 * pause / rows["frozen"]["elastic ms"]
        print(
            f"a worker goes: {pause:.2f} s from noticing it to the end of the step, "
            f"{found['in frozen steps']:.1f} steps"
        )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.output, {**found, "machine": describe()})


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.benchmarks.elastic", "Measures steps of elastic 1-bit Adam beside plain ones.")
    parser.add_argument("--model", choices=tuple(SIZES), default="mini", help="which BERT")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="sequences a rank")
    parser.add_argument("--rounds", type=positive, default=30, metavar="N", help="turns of every system")
    parser.add_argument("--ranks", type=positive, metavar="N", help="else the launcher's, or 3")
    parser.add_argument("--port", type=positive, default=29_431, metavar="N", help="of the meeting place")
    parser.add_argument("--output", type=Path, default=OUTPUT / "elastic_steps.json", metavar="FILE.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
