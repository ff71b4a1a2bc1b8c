"""The patterns of sparse transformers, blocks of keys that each block of queries attends, with the names and parameters
by which they became known."""

from __future__ import annotations

import random
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire.sparse_attn.block_index import BlockPairs
from thinwire.sparse_attn.layouts.base import (
    Layout,
    all_blocks,
    global_columns,
    global_ranges,
    global_rows,
    join,
    known_attention,
    local_windows,
    random_blocks,
    sliding,
)

Attention = Literal["bidirectional", "unidirectional"]


@dataclass(frozen=True)
class Dense(Layout):
    """Every block: what sparse layouts are compared with."""

    attention: Attention = "bidirectional"

    def _pairs(self, head: int, blocks: int) -> BlockPairs:
        return all_blocks(blocks, blocks)


@dataclass(frozen=True)
class Fixed(Layout):
    """Windows of `num_local_blocks` along the diagonal, and in each window some columns that all rows attend.

    Sparse Transformer (Child et al. 2019, arXiv 1904.10509, section 4.3). The last `num_global_blocks` of each window
    are global; head h takes those before them for h mod `num_different_global_patterns`, counted from the window's end.
    `horizontal_global_attention`: the global blocks' rows attend everything too.
    """

    _least: ClassVar = {"num_local_blocks": 1, "num_global_blocks": 1, "num_different_global_patterns": 1}

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: Attention = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_local_blocks % self.num_global_blocks:
            raise ValueError(
                f"num_local_blocks must be a multiple of num_global_blocks, got {self.num_local_blocks} and "
                f"{self.num_global_blocks}"
            )
        patterns = self.num_different_global_patterns
        if patterns > 1 and not self.different_layout_per_head:
            raise ValueError(f"{patterns} different global patterns need different_layout_per_head=True")
        if patterns > self.num_local_blocks // self.num_global_blocks:
            raise ValueError(
                f"a window of {self.num_local_blocks} blocks has room for "
                f"{self.num_local_blocks // self.num_global_blocks} different global patterns of "
                f"{self.num_global_blocks}, got num_different_global_patterns={patterns}"
            )

    def _pairs(self, head: int, blocks: int) -> BlockPairs:
        columns = self._global_blocks(head, blocks)
        parts = [local_windows(blocks, [self.num_local_blocks]), global_columns(blocks, columns)]
        if self.horizontal_global_attention:
            parts.append(global_rows(blocks, columns))
        return join(parts)

    def _global_blocks(self, head: int, blocks: int) -> list[int]:
        width = self.num_global_blocks
        first = self.num_local_blocks - (1 + head % self.num_different_global_patterns) * width
        whole = blocks - blocks % self.num_local_blocks
        starts = list(range(first, whole, self.num_local_blocks))
        if whole < blocks:  # a last window that is short
            starts.append(max(0, min(whole + first, blocks - width)))
        return [column for start in starts for column in range(start, min(start + width, blocks))]


@dataclass(frozen=True)
class Variable(Layout):
    """Windows of the sizes `local_window_blocks`, the last of which repeats; global blocks; random blocks.

    `global_block_indices`: blocks that all attend, or with `global_block_end_indices` the first of ranges of them.
    `num_random_blocks`: so many a row besides, drawn from `seed`.
    """

    _least: ClassVar = {"num_random_blocks": 0}
    _counted_in_a_row: ClassVar = ("num_random_blocks",)

    num_random_blocks: int = 0
    local_window_blocks: tuple[int, ...] = (4,)
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None
    attention: Attention = "bidirectional"
    horizontal_global_attention: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.local_window_blocks
        if not isinstance(sizes, Sequence) or not sizes or any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(
                f"local_window_blocks must list sizes, whole numbers of at least 1, got {reprlib.repr(sizes)}"
            )

    def _pairs(self, head: int, blocks: int) -> BlockPairs:
        columns = global_ranges(self.global_block_indices, self.global_block_end_indices, blocks)
        parts = [local_windows(blocks, self.local_window_blocks), global_columns(blocks, columns)]
        if self.horizontal_global_attention:
            parts.append(global_rows(blocks, columns))
        return _with_random(self, parts, head, blocks, self.num_random_blocks, self.seed)


@dataclass(frozen=True)
class BigBird(Layout):
    """A sliding window, the first blocks global both ways, and random blocks.

    Big Bird (Zaheer et al. 2020, arXiv 2007.14062), its ITC form. `num_random_blocks`: so many a row besides window and
    global blocks, drawn from `seed`.
    """

    _least: ClassVar = {"num_random_blocks": 0, "num_global_blocks": 0, "num_sliding_window_blocks": 1}
    _counted_in_a_row: ClassVar = ("num_random_blocks", "num_sliding_window_blocks", "num_global_blocks")

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: Attention = "bidirectional"
    seed: int = 0

    def _pairs(self, head: int, blocks: int) -> BlockPairs:
        first = range(self.num_global_blocks)
        parts = [
            sliding(blocks, self.num_sliding_window_blocks),
            global_columns(blocks, first),
            global_rows(blocks, first),
        ]
        return _with_random(self, parts, head, blocks, self.num_random_blocks, self.seed)


@dataclass(frozen=True)
class BSLongformer(Layout):
    """A sliding window and global blocks, both ways: Longformer (Beltagy et al. 2020, arXiv 2004.05150) in blocks.

    `global_block_indices`: the global blocks, or with `global_block_end_indices` the first of ranges of them.
    """

    _least: ClassVar = {"num_sliding_window_blocks": 1}
    _counted_in_a_row: ClassVar = ("num_sliding_window_blocks",)

    num_sliding_window_blocks: int = 3
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None
    attention: Attention = "bidirectional"

    def _pairs(self, head: int, blocks: int) -> BlockPairs:
        every = global_ranges(self.global_block_indices, self.global_block_end_indices, blocks)
        band = sliding(blocks, self.num_sliding_window_blocks)
        return join([band, global_columns(blocks, every), global_rows(blocks, every)])


@dataclass(frozen=True)
class LocalSlidingWindow(Layout):
    """A sliding window alone; unidirectional, its lower half."""

    _least: ClassVar = {"num_sliding_window_blocks": 1}
    _counted_in_a_row: ClassVar = ("num_sliding_window_blocks",)

    num_sliding_window_blocks: int = 3
    attention: Attention = "unidirectional"

    def _pairs(self, head: int, blocks: int) -> BlockPairs:
        return sliding(blocks, self.num_sliding_window_blocks)


class Custom(Layout):
    """Any blocks: `block_mask`, boolean [heads, rows, columns] or [rows, columns] for every head, True = attend.

    For one length only. Rows and columns may differ in number: queries of one sequence, keys of another.
    """

    block_mask: Tensor
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, block_mask: Tensor, block: int = 16, attention: Attention = "bidirectional") -> None:
        if block_mask.dtype != torch.bool or block_mask.dim() not in (2, 3):
            raise ValueError(
                "block_mask must be boolean, [heads, rows, columns] or [rows, columns], got "
                f"{block_mask.dtype} {list(block_mask.shape)}"
            )
        known_attention(attention)
        mask = block_mask.cpu().clone().view(-1, *block_mask.shape[-2:])
        if attention == "unidirectional" and mask.size(1) != mask.size(2):
            raise ValueError(
                f"a unidirectional layout needs as many rows as columns, got {mask.size(1)} and {mask.size(2)}"
            )
        super().__init__(mask.size(0), block, different_layout_per_head=True)
        object.__setattr__(self, "attention", attention)
        object.__setattr__(self, "block_mask", mask)
        pattern = mask.numpy().tobytes()
        object.__setattr__(self, "_content", f"{self!r} {attention} {mask.shape} {sha256(pattern).hexdigest()}")

    def _blocks_of(self, query_length: int, key_length: int) -> tuple[int, int]:
        rows, columns = super()._blocks_of(query_length, key_length)
        expected = self.block_mask.size(1), self.block_mask.size(2)
        if (rows, columns) != expected:
            raise ValueError(
                f"the block mask is for {expected[0]} x {expected[1]} blocks of {self.block}, but {query_length} "
                f"queries and {key_length} keys are {rows} x {columns}"
            )
        return rows, columns

    def _pairs(self, head: int, blocks: int) -> BlockPairs:
        rows, columns = self.block_mask[head].nonzero(as_tuple=True)
        return rows, columns


def _with_random(layout: Layout, parts: list[BlockPairs], head: int, blocks: int, count: int, seed: int) -> BlockPairs:
    taken = join(parts)
    rows, columns = taken
    places = torch.unique(rows * blocks + columns)
    distinct = places // blocks, places % blocks
    # A string seeds alike on every rank and in every process.
    generator = random.Random(f"{seed}/{head}/{blocks}")
    return join([taken, random_blocks(blocks, count, distinct, generator, causal=layout.causal)])
