"""Layouts that are made elsewhere, length by length: DeepSpeed's base class for users' own, and what a module saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.sparse_attn.block_index import BlockIndex
from thinwire.sparse_attn.layouts.named import Layout

__all__ = ["MadeLayout", "SparsityConfig", "layout_of"]


class SparsityConfig:
    """What users derive their own layouts from, as in DeepSpeed: a subclass has `make_layout(seq_len)`, which returns
    0 and 1 [num_heads, blocks, blocks].

    `num_layout_heads`: heads to fill in, 1 where all are alike.
    """

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        self.num_heads = num_heads
        self.block = block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1

    def setup_layout(self, seq_len: int) -> Tensor:
        """No blocks yet: int64 zeros [num_heads, blocks, blocks]. Raises ValueError for no multiple of the block."""
        if seq_len % self.block:
            raise ValueError(f"the sequence has {seq_len} tokens, expected a multiple of the block of {self.block}")
        blocks = seq_len // self.block
        return torch.zeros(self.num_heads, blocks, blocks, dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """`layout`, in place with the first head's blocks in every head where all are alike."""
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout

    def make_layout(self, seq_len: int) -> Tensor:
        """The blocks of `seq_len` tokens, which a subclass gives."""
        raise NotImplementedError(f"{type(self).__name__} has no make_layout(seq_len): derive a class that has")


class MadeLayout(Layout):
    """What `make(seq_len)` returns for whole blocks, 0 and 1 [num_heads, blocks, blocks], as a layout; `causal` to the
    token besides."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, num_heads: int, block: int, make: Callable[[int], Tensor], *, causal: bool = False) -> None:
        super().__init__(num_heads, block, different_layout_per_head=True)
        object.__setattr__(self, "attention", "unidirectional" if causal else "bidirectional")
        object.__setattr__(self, "make", make)
        object.__setattr__(self, "_content", f"{self!r} {id(make)}")

    def _make_index(self, query_length: int, key_length: int) -> BlockIndex:
        rows, columns = self._blocks_of(query_length, key_length)
        if rows != columns:
            raise ValueError(f"this layout is for one sequence, got {query_length} queries and {key_length} keys")
        make: Callable[[int], Tensor] = vars(self)["make"]
        mask = make(rows * self.block)
        if mask.shape != (self.num_heads, rows, rows):
            raise ValueError(
                f"make_layout({rows * self.block}) gave shape {list(mask.shape)}, expected [heads, blocks, blocks] = "
                f"[{self.num_heads}, {rows}, {rows}]"
            )
        pairs = [(one.nonzero()[:, 0], one.nonzero()[:, 1]) for one in mask.cpu()]
        return BlockIndex.from_pairs(self.block, rows, columns, pairs)


def layout_of(config: Any) -> Layout:
    """A layout as it is; one that makes what a `SparsityConfig`, or whatever has its attributes, makes.

    Raises TypeError for anything else.
    """
    if isinstance(config, Layout):
        return config
    if all(hasattr(config, name) for name in ("num_heads", "block", "make_layout")):
        return MadeLayout(config.num_heads, config.block, config.make_layout)
    raise TypeError(
        f"expected a layout, or a sparsity configuration with num_heads, block and make_layout, got "
        f"{type(config).__name__}"
    )
