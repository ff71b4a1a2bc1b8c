"""The systems that `experiments.long_sequences` compares: thinwire's layouts, and what else computes attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from experiments.tasks.attention_peers import (
    Attention,
    compiled_flex_attention,
    dense_attention,
    gathered_attention,
    materialised_attention,
)
from thinwire.sparse_attn import (
    BigBird,
    BSLongformer,
    Fixed,
    Layout,
    LocalSlidingWindow,
    Variable,
    block_sparse_attention,
)

__all__ = [
    "BATCH",
    "BLOCK",
    "DENSE",
    "FLEX",
    "GATHERED",
    "HEADS",
    "HEAD_SIZE",
    "LAYOUTS",
    "MATERIALISED",
    "MODES",
    "RUNS",
    "SLOW_IMPORTS",
    "SYSTEMS",
    "Mode",
    "System",
    "input_bytes",
    "inputs",
]

BATCH, HEADS, HEAD_SIZE, BLOCK = 1, 12, 64, 64
"""BERT-base's attention, one sequence."""

SLOW_IMPORTS = ("experiments.tasks.models", "thinwire.sparse_attn.kernels.cpu.launch")
"""Modules that the processes in which memory is measured need, and that take seconds to import."""

Mode = Literal["forward", "training"]
MODES: tuple[Mode, ...] = ("forward", "training")

DENSE, MATERIALISED = "dense, SDPA", "dense, materialised"
GATHERED, FLEX = "BigBird, gather + SDPA", "BigBird, FlexAttention"

LAYOUTS: dict[str, Layout] = {
    layout.__name__: layout(num_heads=HEADS, block=BLOCK)
    for layout in (BigBird, BSLongformer, Fixed, Variable, LocalSlidingWindow)
}
"""With their default patterns."""


@dataclass(frozen=True)
class System:
    """One way to compute attention.

    Attributes:
        kind: dense attention, thinwire's, or another's on blocks.
        build: the attention for so many tokens.
        compiled: it is compiled for each length anew.
    """

    kind: Literal["dense", "thinwire", "peer"]
    build: Callable[[int], Attention]
    compiled: bool = False


def _sparse(layout: Layout, length: int) -> Attention:
    layout.index(length)
    return lambda q, k, v: block_sparse_attention(q, k, v, layout)


SYSTEMS = {
    DENSE: System("dense", lambda _: dense_attention),
    MATERIALISED: System("dense", lambda _: materialised_attention),
    **{name: System("thinwire", partial(_sparse, layout)) for name, layout in LAYOUTS.items()},
    GATHERED: System("peer", lambda length: gathered_attention(LAYOUTS["BigBird"].index(length))),
    FLEX: System("peer", lambda length: compiled_flex_attention(LAYOUTS["BigBird"].index(length)), compiled=True),
}


def inputs(length: int, *, gradients: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The same random q, k, v, float32 `[BATCH, HEADS, length, HEAD_SIZE]`, at every call."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(BATCH, HEADS, length, HEAD_SIZE, generator=generator).requires_grad_(gradients) for _ in range(3)
    )
    return q, k, v


def input_bytes(length: int) -> int:
    """Bytes of q, k and v together."""
    return 3 * 4 * BATCH * HEADS * length * HEAD_SIZE


def _forward(attend: Attention, q: Tensor, k: Tensor, v: Tensor) -> None:
    with torch.no_grad():
        attend(q, k, v)


def _training(attend: Attention, q: Tensor, k: Tensor, v: Tensor) -> None:
    out = attend(q, k, v)
    # Held until the end, as a training step would.
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    del gradients, out


RUNS: dict[Mode, Callable[[Attention, Tensor, Tensor, Tensor], None]] = {"forward": _forward, "training": _training}
"""Attention without gradients; attention and then the gradients of q, k and v."""
