"""What codecs between the stages of a pipeline cost: the loss of a small GPT whose activations and their gradients are
rounded where stages would meet, as `thinwire.parallel.CompressedStage` rounds them; and of one whose activations are
kept in a subspace, so that few numbers say all of them. In one process: nothing is sent.

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


_INT8, _INT4, _PLAIN_INT4 = partial(_packet, "int8"), partial(_packet, "int4"), partial(_int4, 64, False)
CONTENDERS: dict[str, tuple[Rounding, Rounding]] = {
    "exact": (_exact, _exact),
    "int8, int8": (_INT8, _INT8),
    "int4, int8": (_INT4, _INT8),
    "int4, int4": (_INT4, _INT4),
    "int4 of 64, int8": (_PLAIN_INT4, _INT8),
    "int4 of 64, int4 of 64": (_PLAIN_INT4, _PLAIN_INT4),
    "int4 of 32, int8": (partial(_int4, 32, False), _INT8),
    "int4 of 256, int8": (partial(_int4, 256, False), _INT8),
    "int4 of 64 turned, int8": (partial(_int4, 64, True), _INT8),
}
"""By name: what rounds activations, and what their gradients. Those of so many elements, which share a scale, have no
directions beside them."""

SUBSPACES = {f"subspace of {kept}": kept for kept in (32, 16, 8)}
"""By name: of how many dimensions, of the model's `width`."""


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: Rounding, back: Rounding, hidden: Tensor) -> Tensor:
        ctx.back = back
        return there(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:  # type: ignore[override]
        return None, None, ctx.back(gradient)


class _Subspace:
    """What blocks add to activations, up to the last boundary, lies in a random subspace that all stages know (Protocol
    Models, arXiv 2506.01260, with the subspace as it began). A stage then sends an activation less what its character
    and place began as, in the subspace's coordinates, and gets its gradient back in them: nothing is lost but for what
    the model cannot learn.
    """

    def __init__(self, model: CharacterModel, kept: int, last: int, seed: int) -> None:
        width = model.head.in_features
        random = torch.Generator().manual_seed(seed)
        self._basis = torch.linalg.qr(torch.randn(width, kept, generator=random)).Q  # [width, kept]
        tables = (model.characters, model.places)
        self._tables = [(one.weight, one.weight.detach().clone()) for one in tables]  # and as it began
        self._writers = [one.weight for block in list(model.blocks)[: last + 1] for one in (block.mix, block.narrow)]
        self._known = torch.empty(0)
        model.register_forward_pre_hook(self._look_up)
        self.project()

    @torch.no_grad()
    def project(self) -> None:
        """Put what was learned into the subspace: after every step of an optimizer."""
        for weight, began in self._tables:
            weight.copy_(began + (weight - began) @ self._basis @ self._basis.T)
        for weight in self._writers:
            weight.copy_(self._basis @ (self._basis.T @ weight))

    def send(self, _block: Any, _given: Any, hidden: Tensor) -> Tensor:
        """What the next stage makes of what arrives: a forward hook."""
        return self._known + (hidden - self._known) @ self._basis @ self._basis.T

    def _look_up(self, _model: Any, given: tuple[Tensor, ...]) -> None:
        (_, characters), (_, places) = self._tables
        self._known = characters[given[0]] + places[: given[0].shape[1]]


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
                loss = _train(task, stages, name, options.steps, number)
                spent = time.process_time() - started
                print(f"{name:24} {stages} stages, seed {number}: {loss:.4f}, {spent:.0f} s of CPU", flush=True)
                found["runs"].append({"codecs": name, "stages": stages, "seed": number, "loss": loss})
                write_json(options.output, found)
    return 0


def _train(task: NextCharacterTask, stages: int, name: str, steps: int, seed: int) -> float:
    """The validation loss in the end, nats a character; boundaries do then as they did before."""
    model = task.build_model(seed)
    between = _SIZE.layers // stages
    boundaries = range(between - 1, _SIZE.layers - 1, between)
    subspace = _Subspace(model, SUBSPACES[name], boundaries[-1], seed) if name in SUBSPACES else None
    for number in boundaries:
        send = partial(_round, CONTENDERS[name]) if subspace is None else subspace.send
        model.blocks[number].register_forward_hook(send)
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
        if subspace is not None:
            subspace.project()
    return _validate(task, model)


def _round(rounding: tuple[Rounding, Rounding], _block: Any, _given: Any, hidden: Tensor) -> Any:
    return _Boundary.apply(*rounding, hidden)


@torch.no_grad()
def _validate(task: NextCharacterTask, model: CharacterModel) -> float:
    total, characters = task.validation_sum(model, 0, 1)
    return total / characters


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.convergence.pipeline_codecs", "Shows what codecs between stages of a pipeline cost.")
    both = [*CONTENDERS, *SUBSPACES]
    parser.add_argument("--steps", type=positive, default=400)
    parser.add_argument("--seeds", type=seed, default=1)
    parser.add_argument("--contenders", nargs="+", choices=both, default=both, metavar="NAME")
    parser.add_argument("--output", type=Path, default=OUTPUT / "pipeline_codecs.json", help="the JSON file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
