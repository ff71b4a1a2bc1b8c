"""How long a step takes: thinwire's engine beside torch's DDP and ZeroRedundancyOptimizer, all in one process group.

Systems take turns of a few steps, so that whatever else the machine does hits them alike.
`experiments.benchmarks.engine` starts it on its ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from experiments.common.command_line import Parser, positive
from experiments.common.launching import launch
from experiments.common.results import write_json
from experiments.tasks.batches import random_batch
from experiments.tasks.sizes import SIZES
from experiments.training.optimizers import engine_section
from thinwire import initialize
from thinwire.comm import Communicator

__all__ = ["BASELINE", "REDUNDANCY", "main", "measure"]

BASELINE = "torch DDP, fused AdamW"
REDUNDANCY = "torch ZeroRedundancyOptimizer"

_STEPS_A_TURN = 3
_FREEZE_STEP = 2
_VOCABULARY, _LENGTH = 4096, 32
_RATE = 1e-4

Batch = tuple[Tensor, Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, on the ranks it asks for or a launcher started; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch("experiments.benchmarks.engine_step_time", _parse, measure, given, 2)


def measure(comm: Communicator, options: argparse.Namespace) -> None:
    """Writes milliseconds a step of every system in every round, of the slowest rank. Collective."""
    systems = _systems(options.model, options.batch_size, comm)
    batches = [
        random_batch(options.batch_size, _LENGTH, _VOCABULARY, seed=1000 * step + comm.rank)
        for step in range(_STEPS_A_TURN)
    ]
    rounds = []
    # The first round compiles kernels, fills caches and freezes 1-bit Adam.
    for number in range(options.rounds + 1):
        times = torch.tensor([_turn(step, batches, comm) for step in systems.values()], dtype=torch.float64)
        comm.all_reduce(times, "max")
        if number:
            rounds.append((1e3 * times / _STEPS_A_TURN).tolist())
        if comm.rank == 0:
            print(f"step time: round {number} of {options.rounds}", file=sys.stderr, flush=True)
    if comm.rank == 0:
        milliseconds = dict(zip(systems, map(list, zip(*rounds, strict=True)), strict=True))
        write_json(options.output, {"ranks": comm.size, "backend": comm.backend, "milliseconds": milliseconds})


def _turn(step: Callable[[Batch], None], batches: Sequence[Batch], comm: Communicator) -> float:
    """Seconds that the steps of a turn take on this rank."""
    comm.barrier()
    started = time.perf_counter()
    for batch in batches:
        step(batch)
    return time.perf_counter() - started


def _systems(model: str, batch_size: int, comm: Communicator) -> dict[str, Callable[[Batch], None]]:
    """What takes a step, gradients reset included, by its name."""
    adamw = engine_section("adamw", _RATE, _FREEZE_STEP, fused=True)
    onebit = engine_section("onebit-adam", _RATE, _FREEZE_STEP)
    systems = {
        BASELINE: _torch_step(_model(model), lambda parameters: torch.optim.AdamW(parameters, lr=_RATE, fused=True)),
        REDUNDANCY: _torch_step(
            _model(model),
            lambda parameters: ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=_RATE, fused=True),
        ),
    }
    for stage in (0, 1, 2):
        for overlap, suffix in ((False, ""), (True, ", overlap_comm"))[: 2 if stage else 1]:
            config = {
                "train_micro_batch_size_per_gpu": batch_size,
                "optimizer": adamw,
                "zero_optimization": {"stage": stage, "overlap_comm": overlap},
            }
            systems[f"stage {stage}, fused AdamW{suffix}"] = _engine_step(_model(model), config, comm)
    for stage in (1, 2):
        config = {
            "train_micro_batch_size_per_gpu": batch_size,
            "optimizer": onebit,
            "zero_optimization": {"stage": stage},
        }
        systems[f"stage {stage}, 1-bit Adam, frozen"] = _engine_step(_model(model), config, comm)
    return systems


def _model(name: str) -> nn.Module:
    from experiments.tasks.models import build_bert

    return build_bert(SIZES[name], _VOCABULARY, _LENGTH, 0.0, seed=0)


def _torch_step(model: nn.Module, build: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Batch], None]:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = build(model.parameters())

    def step(batch: Batch) -> None:
        total, count = wrapped(*batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _engine_step(model: nn.Module, config: dict[str, Any], comm: Communicator) -> Callable[[Batch], None]:
    engine, *_ = initialize(model=model, config=config, comm=comm)

    def step(batch: Batch) -> None:
        total, count = engine(*batch)
        engine.backward(total / count)
        engine.step()

    return step


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "experiments.benchmarks.engine_step_time",
        "Measures steps of the engine and of torch; experiments.benchmarks.engine starts it.",
    )
    parser.add_argument("--model", choices=tuple(SIZES), default="small", help="which BERT")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="sequences a rank")
    parser.add_argument("--rounds", type=positive, default=12, metavar="N", help="turns of every system")
    parser.add_argument("--ranks", type=positive, metavar="N", help="else the launcher's, or 2")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json", help="for the measurements")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
