"""What a step of 1-bit Adam costs the processor beyond a backward that sends nothing, on ranks that are threads.

Backwards hand out gradients that are there already, so that what is measured is the optimizer. Systems take turns; the
least of many rounds is reported, of the whole process, divided by the ranks: other work on the machine adds to a round
and never takes from it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import thinwire
from experiments.common import machine
from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError, refuse
from experiments.common.results import OUTPUT, check_writable, write_json
from thinwire.comm import Communicator
from thinwire.comm.threads import run

__all__ = ["NOTHING", "main"]

NOTHING = "sends nothing"

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_RATE = 1e-4
_FREEZE_STEP = 2
_WARMUP_ROUNDS = 4
_ONE_BUCKET = 1 << 30

Step = Callable[[], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table and writes JSON; the exit code."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        check_writable(options.output.parent, "--output")
    except InputError as error:
        return refuse("experiments.benchmarks.frozen_step", error)
    torch.set_num_threads(1)
    results = []
    print(f"{'':34} {'ranks':>5} {'dtype':>5} {'CPU ms a step':>13} {'added':>8}")
    for dtype in _DTYPES:
        for ranks in options.ranks:
            least = run(lambda comm, dtype=dtype: _measure(comm, options, dtype), ranks, timeout=600)[0]
            for name, milliseconds in least.items():
                added = milliseconds - least[NOTHING]
                print(f"{name:34} {ranks:5} {dtype:>5} {milliseconds:13.2f} {added:8.2f}")
                results.append(
                    {"name": name, "ranks": ranks, "dtype": dtype, "milliseconds": milliseconds, "added": added}
                )
    elements = sum(shape.numel() for shape in _shapes(options.layers))
    content = {"machine": machine.describe(), "elements": elements, "rounds": options.rounds, "results": results}
    write_json(options.output, content)
    print(f"Written: {options.output}")
    return 0


def _measure(comm: Communicator, options: argparse.Namespace, dtype: str) -> dict[str, float]:
    """Milliseconds of processor time a step and rank of every system, the least of all rounds. Collective."""
    systems = _systems(comm, options.layers, _DTYPES[dtype])
    least = dict.fromkeys(systems, float("inf"))
    for number in range(_WARMUP_ROUNDS + options.rounds):
        for name, step in systems.items():
            comm.barrier()
            started = time.process_time()
            step()
            comm.barrier()
            elapsed = (time.process_time() - started) * 1e3 / comm.size
            if number >= _WARMUP_ROUNDS:
                least[name] = min(least[name], elapsed)
    return least


def _systems(comm: Communicator, layers: int, dtype: torch.dtype) -> dict[str, Step]:
    """What takes a step, by its name."""

    def onebit(**options: object) -> Step:
        settings = {"lr": _RATE, "freeze_step": _FREEZE_STEP, "comm": comm} | options
        return _step(layers, dtype, lambda parameters: thinwire.OneBitAdam(parameters, **settings))

    systems = {NOTHING: _step(layers, dtype, None)}
    if dtype == torch.float32:
        systems["torch AdamW, fused"] = _step(
            layers, dtype, lambda parameters: torch.optim.AdamW(parameters, lr=_RATE, fused=True)
        )
    systems["1-bit Adam, frozen"] = onebit()
    systems["1-bit Adam, frozen, one bucket"] = onebit(bucket_bytes=_ONE_BUCKET)
    systems["1-bit Adam, warming up"] = onebit(freeze_step=1 << 30)
    systems["1-bit Adam, stage 1, frozen"] = onebit(stage=1)
    return systems


def _step(layers: int, dtype: torch.dtype, build: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None) -> Step:
    generator = torch.Generator().manual_seed(0)

    def random(shape: torch.Size) -> Tensor:
        return (0.02 * torch.randn(shape, generator=generator)).to(dtype)

    parameters = [nn.Parameter(random(shape)) for shape in _shapes(layers)]
    gradients = [random(shape) for shape in _shapes(layers)]
    optimizer = None if build is None else build(parameters)

    def step() -> None:
        torch.autograd.backward(parameters, gradients)
        if optimizer is not None:
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    return step


def _shapes(layers: int) -> list[torch.Size]:
    """Matrices and vectors in turn, four tensors a layer: 200 000 elements a layer."""
    wide = [torch.Size(shape) for shape in ((256, 1024), (256,), (1024,), (256,))]
    narrow = [torch.Size(shape) for shape in ((256, 256), (256, 256), (256,), (256,))]
    return [shape for layer in range(layers) for shape in (narrow if layer % 2 else wide)]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "experiments.benchmarks.frozen_step",
        "Measures the processor time that a step of 1-bit Adam adds to a backward.",
        "half a minute",
    )
    parser.add_argument("--layers", type=positive, default=25, metavar="N", help="of 4 tensors, 200 000 elements each")
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 2], metavar="N", help="threads that are ranks")
    parser.add_argument("--rounds", type=positive, default=30, metavar="N", help="turns of every system")
    parser.add_argument(
        "--output", type=Path, default=OUTPUT / "frozen_step.json", metavar="FILE.json", help="for the measurements"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
