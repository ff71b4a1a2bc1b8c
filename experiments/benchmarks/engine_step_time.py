"""How long a step takes: thinwire's engine beside torch's DDP and ZeroRedundancyOptimizer, all in one process group.

Systems take turns of a few steps, so that whatever else the machine does hits them alike.
`experiments.benchmarks.engine` starts it on its ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
from experiments.training.hooks import bf16_hook
from experiments.training.optimizers import engine_section
from thinwire import initialize
from thinwire.comm import Communicator

__all__ = ["BASELINE", "RATE", "REDUNDANCY", "bert", "engine_step", "main", "measure", "take_turns", "torch_step"]

BASELINE = "torch DDP, fused AdamW"
REDUNDANCY = "torch ZeroRedundancyOptimizer"

_STEPS_A_TURN = 3
FREEZE_STEP = 2
_VOCABULARY, _LENGTH = 4096, 32
RATE = 1e-4

Batch = tuple[Tensor, Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, on the ranks it asks for or a launcher started; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch("experiments.benchmarks.engine_step_time", _parse, measure, given, 2)


def measure(comm: Communicator, options: argparse.Namespace) -> None:
    """Writes milliseconds a step of every system in every round, of the slowest rank. Collective."""
    milliseconds = take_turns(_systems(options.model, options.batch_size, comm), options, comm)
    if comm.rank == 0:
        write_json(options.output, {"ranks": comm.size, "backend": comm.backend, "milliseconds": milliseconds})


def take_turns(
    systems: Mapping[str, Callable[[Batch], None]], options: argparse.Namespace, comm: Communicator
) -> dict[str, list[float]]:
    """Milliseconds a step of every system in every round, of the slowest rank. Collective."""
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
    return dict(zip(systems, map(list, zip(*rounds, strict=True)), strict=True))


def _turn(step: Callable[[Batch], None], batches: Sequence[Batch], comm: Communicator) -> float:
    """Seconds that the steps of a turn take on this rank."""
    comm.barrier()
    started = time.perf_counter()
    for batch in batches:
        step(batch)
    return time.perf_counter() - started


def _systems(model: str, batch_size: int, comm: Communicator) -> dict[str, Callable[[Batch], None]]:
    """What takes a step, gradients reset included, by its name."""
    adamw = engine_section("adamw", RATE, FREEZE_STEP, fused=True)
    onebit = engine_section("onebit-adam", RATE, FREEZE_STEP)
    systems = {
        BASELINE: torch_step(bert(model), lambda parameters: torch.optim.AdamW(parameters, lr=RATE, fused=True)),
        REDUNDANCY: torch_step(
            bert(model),
            lambda parameters: ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=RATE, fused=True),
        ),
    }
    for stage in (0, 1, 2):
        for overlap, suffix in ((False, ""), (True, ", overlap_comm"))[: 2 if stage else 1]:
            config = {
                "train_micro_batch_size_per_gpu": batch_size,
                "optimizer": adamw,
                "zero_optimization": {"stage": stage, "overlap_comm": overlap},
            }
            systems[f"stage {stage}, fused AdamW{suffix}"] = engine_step(bert(model), config, comm)
    for stage in (1, 2):
        config = {
            "train_micro_batch_size_per_gpu": batch_size,
            "optimizer": onebit,
            "zero_optimization": {"stage": stage},
        }
        systems[f"stage {stage}, 1-bit Adam, frozen"] = engine_step(bert(model), config, comm)
    return systems


def bert(name: str) -> nn.Module:
    """A new BERT, as all systems have it."""
    from experiments.tasks.models import build_bert

    return build_bert(SIZES[name], _VOCABULARY, _LENGTH, 0.0, seed=0)


def torch_step(model: nn.Module, build: Callable[[Any], Any], *, bf16: bool = False) -> Callable[[Batch], None]:
    """A step of DDP, which averages in fp32 or `bf16`, with the optimizer that `build` makes of the parameters."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if bf16:
        wrapped.register_comm_hook(None, bf16_hook)
    optimizer = build(model.parameters())

    def step(batch: Batch) -> None:
        total, count = wrapped(*batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_step(model: nn.Module, config: dict[str, Any], comm: Communicator) -> Callable[[Batch], None]:
    """A step of the engine."""
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
