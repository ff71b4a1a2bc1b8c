"""What codecs between the stages of a pipeline cost: the loss of a small GPT whose activations and their gradients are
rounded where stages would meet, as `thinwire.parallel.CompressedStage` rounds them. In one process: nothing is sent.

    python -m experiments.convergence.pipeline_codecs
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.common.command_line import Parser, positive, seed
from experiments.common.errors import InputError, refuse
from experiments.common.results import OUTPUT, check_writable, read_json, write_json
from experiments.tasks.corpus import load
from experiments.tasks.next_character import CharacterModel, CharacterModelSize, NextCharacterTask, encode
from thinwire.compress import Header
from thinwire.parallel.compressed_stage import activation_codec, pack, unpack

__all__ = ["CONTENDERS", "main"]

Rounding = Callable[[Tensor], Tensor]

_SIZE = CharacterModelSize(layers=4, width=128, heads=4, length=64)
_WINDOWS, _HELD_OUT = 8, 256
_CHARACTERS = 3_000_000
_RATE = 2e-3


def _exact(tensor: Tensor) -> Tensor:
    return tensor.clone()


def _packet(name: Any, tensor: Tensor) -> Tensor:
    """What arrives of it."""
    codec = activation_codec(name)
    assert codec is not None
    arrived = torch.empty_like(tensor)
    unpack(codec, pack(codec, tensor, Header(codec.identifier, codec.block_size, bucket=0, step=0)), arrived)
    return arrived


def _int4(block: int, turned: bool, tensor: Tensor) -> Tensor:
    """Through 15 levels with a scale for each `block` elements, in plain torch; `turned` by a Hadamard matrix before,
    and back after."""
    turn = torch.ones(1, 1)
    while turned and len(turn) < block:
        turn = torch.cat([torch.cat([turn, turn], 1), torch.cat([turn, -turn], 1)]) / 2**0.5
    blocks = tensor.reshape(-1, block) @ turn if turned else tensor.reshape(-1, block)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 7
    levels = (blocks / scales).round().clamp(-7, 7).nan_to_num(0.0)
    return (levels * scales @ turn.T if turned else levels * scales).view_as(tensor)


_INT8, _INT4 = partial(_packet, "int8"), partial(_packet, "int4")
CONTENDERS: dict[str, tuple[Rounding, Rounding]] = {
    "exact": (_exact, _exact),
    "int8, int8": (_INT8, _INT8),
    "int4, int8": (_INT4, _INT8),
    "int4, int4": (_INT4, _INT4),
    "int4 of 32, int8": (partial(_int4, 32, False), _INT8),
    "int4 of 256, int8": (partial(_int4, 256, False), _INT8),
    "int4 of 64 turned, int8": (partial(_int4, 64, True), _INT8),
}
"""By name: what rounds activations, and what their gradients."""


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: Rounding, back: Rounding, hidden: Tensor) -> Tensor:
        ctx.back = back
        return there(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:  # type: ignore[override]
        return None, None, ctx.back(gradient)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, prints a line a run and writes JSON after each; the exit code. Runs that the file has are kept."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        check_writable(options.output.parent, "--output")
    except InputError as error:
        return refuse("experiments.convergence.pipeline_codecs", error)
    corpus = load()
    text = encode("\n".join(corpus.training)[:_CHARACTERS], "\n".join(corpus.validation)[:_CHARACTERS])
    task = NextCharacterTask(text, _SIZE, _WINDOWS, _HELD_OUT)
    settings = {
        "steps": options.steps,
        "rate": _RATE,
        "windows": _WINDOWS,
        "layers": _SIZE.layers,
        "width": _SIZE.width,
    }
    found = read_json(options.output) if options.output.exists() else {**settings, "runs": []}
    done = [(one["codecs"], one["stages"], one["seed"]) for one in found["runs"]]
    for number in range(options.seeds):
        for name in options.contenders:
            for stages in (1,) if name == "exact" else (2, 4):
                if (name, stages, number) in done:
                    continue
                started = time.process_time()
                loss = _train(task, stages, CONTENDERS[name], options.steps, number)
                spent = time.process_time() - started
                print(f"{name:24} {stages} stages, seed {number}: {loss:.4f}, {spent:.0f} s of CPU", flush=True)
                found["runs"].append({"codecs": name, "stages": stages, "seed": number, "loss": loss})
                write_json(options.output, found)
    return 0


def _train(task: NextCharacterTask, stages: int, rounding: tuple[Rounding, Rounding], steps: int, seed: int) -> float:
    """The validation loss in the end, nats a character; boundaries round then as they did before."""
    model = task.build_model(seed)
    between = _SIZE.layers // stages
    for block in list(model.blocks)[between - 1 : -1 : between]:
        block.register_forward_hook(lambda _module, _given, hidden: _Boundary.apply(*rounding, hidden))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    warmup = steps // 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup if warmup else 1.0, max(0.0, (steps - step) / (steps - warmup)))
    )
    for step in range(steps):
        task.training_loss(model, seed, step, rank=0, ranks=1).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return _validate(task, model)


@torch.no_grad()
def _validate(task: NextCharacterTask, model: CharacterModel) -> float:
    total, characters = task.validation_sum(model, 0, 1)
    return total / characters


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.convergence.pipeline_codecs", "Shows what codecs between stages of a pipeline cost.")
    parser.add_argument("--steps", type=positive, default=400)
    parser.add_argument("--seeds", type=seed, default=1)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS], metavar="NAME")
    parser.add_argument("--output", type=Path, default=OUTPUT / "pipeline_codecs.json", help="the JSON file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
