"""How long a sequence BERT can train on in a fixed memory: peak memory of real training steps, by length.

A step is forward, backward and AdamW's update of one sequence in float32, with BERT's dropout of 0.1; weights,
gradients and AdamW's state count. Each length is measured in a process of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from experiments.common.peak_memory import PeakMemory, measure_alone
from experiments.long_sequences.systems import BLOCK, SLOW_IMPORTS
from experiments.tasks.sizes import SIZES, BertSize
from thinwire.engine.activation_checkpointing import checkpoint_activations
from thinwire.sparse_attn import BigBird, sparsify

__all__ = ["ATTENTIONS", "Growth", "grow", "measure"]

ATTENTIONS = ("dense", "sparse")
"""Hugging Face's "eager", which materialises scores; and BigBird through `sparsify`."""

_VOCABULARY, _DROPOUT, _ASKED_EVERY = 30522, 0.1, 7
_WARMUP_LENGTH = 256

AttentionName = Literal["dense", "sparse"]


@dataclass(frozen=True)
class Growth:
    """Peak bytes as a polynomial of the length, through measured points.

    Attributes:
        measured: bytes by length.
        coefficients: of the highest power first: two for sparse attention, three for dense.
        held_out_length: the longest one measured, which the polynomial has not seen.
        held_out_error: by how much the polynomial was wrong there, as a fraction.
    """

    measured: dict[int, int]
    coefficients: list[float]
    held_out_length: int
    held_out_error: float

    def longest(self, memory: float) -> int:
        """The most tokens, whole blocks, whose step fits this many bytes; 0 where the weights alone do not."""
        *powers, constant = self.coefficients
        roots = np.roots([*powers, constant - memory])
        positive_roots = [root.real for root in roots if abs(root.imag) < 1e-9 and root.real > 0]
        return int(max(positive_roots, default=0)) // BLOCK * BLOCK


def measure(size: str, attention: AttentionName, length: int, *, checkpointing: bool) -> int:
    """Peak bytes of a training step, in a process of its own."""
    return measure_alone(_measure_here, size, attention, length, checkpointing, imported_before=SLOW_IMPORTS)


def grow(measured: Mapping[int, int], degree: int) -> Growth:
    """The polynomial through all lengths but the longest, which tells how far to trust it.

    `measured`: peak bytes by length, one length more than the polynomial has coefficients.
    """
    *seen, held_out = sorted(measured)
    if len(seen) <= degree:
        raise ValueError(f"a polynomial of degree {degree} needs {degree + 2} lengths, got {len(measured)}")
    # In units of the longest length and of gigabytes, so that no power dwarfs the others.
    lengths, heights = [length / held_out for length in seen], [measured[length] / 1e9 for length in seen]
    fitted = 1e9 * np.polyfit(lengths, heights, degree)
    error = float(np.polyval(fitted, 1.0)) / measured[held_out] - 1
    coefficients = [float(one) / held_out**power for power, one in zip(range(degree, -1, -1), fitted, strict=True)]
    return Growth(dict(sorted(measured.items())), coefficients, held_out, error)


def _measure_here(size: str, attention: AttentionName, length: int, checkpointing: bool) -> int:
    _train_step(SIZES["tiny"], attention, _WARMUP_LENGTH, checkpointing)
    with PeakMemory() as peak:
        _train_step(SIZES[size], attention, length, checkpointing)
    return peak.extra


def _train_step(size: BertSize, attention: AttentionName, length: int, checkpointing: bool) -> None:
    # Importing transformers takes seconds, which the process that only asks is spared.
    from experiments.tasks.models import build_bert

    model = build_bert(size, _VOCABULARY, length, _DROPOUT, seed=0)
    if attention == "sparse":
        sparsify(model, BigBird(num_heads=size.heads, block=BLOCK))
    else:
        model.set_attn_implementation("eager")
    if checkpointing:
        checkpoint_activations(model, ["BertLayer"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    # Gradients keep their places, as in DDP's buckets, and AdamW has its state: so it is in all steps but the first.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    inputs = torch.randint(5, _VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(inputs, -100)
    labels[:, ::_ASKED_EVERY] = inputs[:, ::_ASKED_EVERY]
    total, count = model(inputs, labels)
    (total / count).backward()
    if not math.isfinite(total.item()):
        raise ArithmeticError(f"the loss at {length} tokens is {total.item()}")
    optimizer.step()
