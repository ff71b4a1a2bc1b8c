"""What codecs lose of what they carry, against the bits that they take: of random numbers with tails of different
weight, and of what a small model sends: gradients, momenta and the outer gradients of DiLoCo."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError, refuse
from experiments.common.results import OUTPUT, check_writable, write_json
from experiments.tasks.corpus import load
from experiments.tasks.next_character import CharacterModelSize, NextCharacterTask, encode
from thinwire.compress.kernels.calls import Encode
from thinwire.compress.kernels.loading import execute
from thinwire.compress.packet_layout import HEADER_BYTES, packet_bytes

__all__ = ["CONTENDERS", "main"]

CONTENDERS = [
    ("sign1", 2048),
    ("stat2", 2048),
    *(("int4", block_size) for block_size in (2048, 512, 256, 128, 64)),
    ("fp8", 2048),
    ("int8", 2048),
]
"""Codecs, and elements that share their scales."""

_LARGEST_BLOCK = 2048
_RANDOM = 1 << 20
_SIZE = CharacterModelSize(layers=2, width=128, heads=4, length=64)
_CHARACTERS = 1_000_000
_RATE, _LOCAL_STEPS = 2e-3, 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table and writes JSON; the exit code."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        check_writable(options.output.parent, "--output")
    except InputError as error:
        return refuse("experiments.benchmarks.codec_errors", error)
    torch.manual_seed(0)
    carried = {**_random_numbers(), **_of_a_model(options.steps)}
    print(f"{'':14} {'bits':>6}" + "".join(f" {name:>14}" for name in carried))
    results = []
    for codec, block_size in CONTENDERS:
        bits = 8 * (packet_bytes(codec, block_size, block_size) - HEADER_BYTES) / block_size
        lost = {name: _lost(codec, values, block_size) for name, values in carried.items()}
        print(f"{codec:6} {block_size:7} {bits:6.3f}" + "".join(f" {one:14.5f}" for one in lost.values()))
        results.append({"codec": codec, "block_size": block_size, "bits": bits, "lost": lost})
    write_json(options.output, {"steps": options.steps, "results": results})
    print(f"Written: {options.output}")
    return 0


def _lost(codec: str, values: Tensor, block_size: int) -> float:
    """The part of the energy of `values`, fp32 [n], that stays in the residual."""
    numel = values.numel() // _LARGEST_BLOCK * _LARGEST_BLOCK
    lost = values[:numel].clone()
    packets = torch.zeros(1, packet_bytes(codec, numel, block_size), dtype=torch.uint8)
    execute(Encode(codec, lost, None, packets, numel, block_size))
    return float(lost.square().sum() / values[:numel].square().sum())


def _random_numbers() -> dict[str, Tensor]:
    return {
        "Gaussian": torch.randn(_RANDOM),
        "Laplace": torch.distributions.Laplace(0.0, 1.0).sample((_RANDOM,)),
        "Student's t, 3": torch.distributions.StudentT(3.0).sample((_RANDOM,)),
    }


def _of_a_model(steps: int) -> dict[str, Tensor]:
    """What a character model would send after `steps` steps of AdamW: a gradient, a momentum, and what the last 30
    steps, or as many as there are, have changed."""
    corpus = load()
    text = encode("\n".join(corpus.training)[:_CHARACTERS], "\n".join(corpus.validation)[:_CHARACTERS])
    task = NextCharacterTask(text, _SIZE, batch_size=16, validation_windows=1)
    model = task.build_model(seed=0)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=_RATE)
    outer = _flat(parameters)
    for step in range(steps):
        if step == steps - _LOCAL_STEPS:
            outer = _flat(parameters)
        optimizer.zero_grad()
        task.training_loss(model, seed=0, step=step, rank=0, ranks=1).backward()
        optimizer.step()
    return {
        "gradient": _flat([one.grad for one in parameters if one.grad is not None]),
        "momentum": _flat([optimizer.state[one]["exp_avg"] for one in parameters]),
        "outer gradient": outer - _flat(parameters),
    }


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in tensors])


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.benchmarks.codec_errors", "Measures what codecs lose, against the bits they take.")
    parser.add_argument("--steps", type=positive, default=300, help="that the model is trained before it is looked at")
    parser.add_argument("--output", type=Path, default=OUTPUT / "codec_errors.json", help="the JSON file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
