"""A layout as kernels read it: which blocks each row of blocks attends and which attend each column, in a few integers
a block instead of a mask of all; the pattern, what a kernel is told besides its matrices; and the named tuples in which
kernels of every device take tensors, with strides in elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

BlockPairs = tuple[Tensor, Tensor]
"""Rows and columns of blocks, int64 [n] each, in any order, each pair once or more often."""


@dataclass(frozen=True, eq=False)
class EqualLines:
    """Rows of blocks, or columns, that hold the same number n of blocks, so that one batched product serves them.

    All int64. `lines` [g]: head * lines of a head + line. `others` [g, n]: the column of each block of a row, or the
    row of each of a column, counted over heads likewise. `entries` [g, n]: the blocks' places in the packed order.
    """

    lines: Tensor
    others: Tensor
    entries: Tensor

    def pieces(self, most_blocks: int) -> list[EqualLines]:
        """The same in pieces of at most `most_blocks` blocks, or of one line."""
        lines = max(1, most_blocks // max(1, self.others.size(1)))
        split = (torch.split(one, lines) for one in (self.lines, self.others, self.entries))
        return [EqualLines(*one) for one in zip(*split, strict=True)]


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """Compact indices both ways, all int32, on one device.

    Row r of head h attends `columns[row_offsets[h * num_rows + r] : row_offsets[h * num_rows + r + 1]]`, ascending;
    column c is attended by `rows[column_offsets[h * num_columns + c] : column_offsets[h * num_columns + c + 1]]`,
    ascending. `num_heads` is 1 where all heads are alike. The last row and column of blocks may be short of tokens.
    """

    block: int
    num_heads: int
    num_rows: int
    num_columns: int
    row_offsets: Tensor
    columns: Tensor
    column_offsets: Tensor
    rows: Tensor

    @classmethod
    def from_pairs(cls, block: int, num_rows: int, num_columns: int, heads: Sequence[BlockPairs]) -> BlockIndex:
        """The index of heads with these blocks, on the CPU; heads that are all alike become one."""
        height, width = max(1, num_rows), max(1, num_columns)
        places = [torch.unique(rows * width + columns) for rows, columns in heads]
        if all(torch.equal(one, places[0]) for one in places[1:]):
            places = places[:1]
        size = num_rows * num_columns
        by_row = torch.cat([one + head * size for head, one in enumerate(places)])
        transposed = [torch.sort(one % width * height + one // width).values for one in places]
        by_column = torch.cat([one + head * size for head, one in enumerate(transposed)])
        rows_of = _offsets(by_row, num_columns, len(places) * num_rows), (by_row % width).int()
        columns_of = _offsets(by_column, num_rows, len(places) * num_columns), (by_column % height).int()
        return cls(block, len(places), num_rows, num_columns, *rows_of, *columns_of)

    def to(self, device: torch.device | str) -> BlockIndex:
        """The same on another device."""
        tensors = (self.row_offsets, self.columns, self.column_offsets, self.rows)
        moved = [tensor.to(device) for tensor in tensors]
        return BlockIndex(self.block, self.num_heads, self.num_rows, self.num_columns, *moved)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Head, row and column of every block in the packed order, head by head and row by row: int64 [nnz] each."""
        counts = self.row_offsets.diff().long()
        lines = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        return lines // max(1, self.num_rows), lines % max(1, self.num_rows), self.columns.long()

    @cached_property
    def packed_entries(self) -> Tensor:
        """The place in the packed order of every block of `rows`, column by column: int64 [nnz]."""
        heads, rows, columns = self.places
        return torch.argsort((heads * self.num_columns + columns) * self.num_rows + rows)

    @cached_property
    def equal_rows(self) -> tuple[EqualLines, ...]:
        """The rows that hold blocks, by how many they hold."""
        entries = torch.arange(self.columns.numel(), device=self.columns.device)
        return _equal_lines(self.row_offsets, self.columns, self.num_rows, self.num_columns, entries)

    @cached_property
    def equal_columns(self) -> tuple[EqualLines, ...]:
        """The columns that hold blocks, by how many they hold."""
        return _equal_lines(self.column_offsets, self.rows, self.num_columns, self.num_rows, self.packed_entries)

    def density(self) -> float:
        """The part of all blocks that is attended; 0 where there are none."""
        every = self.num_heads * self.num_rows * self.num_columns
        return self.columns.numel() / every if every else 0.0

    def dense(self) -> Tensor:
        """The same as a mask, bool [num_heads, num_rows, num_columns], on the CPU."""
        mask = torch.zeros(self.num_heads, self.num_rows, self.num_columns, dtype=torch.bool)
        mask[self.to("cpu").places] = True
        return mask


def _equal_lines(
    offsets: Tensor, others: Tensor, num_lines: int, num_others: int, entries: Tensor
) -> tuple[EqualLines, ...]:
    """Lines of `offsets`, `num_lines` a head, whose blocks `others` lie in; `entries` are their packed places."""
    counts = offsets.diff().long()
    groups = []
    for count in torch.unique(counts).tolist():
        if not count:
            continue
        lines = (counts == count).nonzero()[:, 0]
        run = offsets[lines].long()[:, None] + torch.arange(count, device=offsets.device)
        first_other = lines[:, None] // num_lines * num_others
        groups.append(EqualLines(lines, first_other + others[run], entries[run]))
    return tuple(groups)


def _offsets(places: Tensor, width: int, count: int) -> Tensor:
    """Where each of `count` runs of `width` places begins among sorted `places`, and where the last ends."""
    return torch.searchsorted(places, torch.arange(count + 1) * width).int()


@dataclass(frozen=True, eq=False)
class Pattern:
    """Which keys queries attend, and how their scores become probabilities; every backend takes it.

    index: the blocks, on the device of q. key_bias: float32 [B, Sk], added to the scores of a key, or None. bias:
    float32 [B|1, H|1, Sq, Sk], added to scores, or None. Where either is -inf nothing is attended. seed: int64 [1], of
    the dropout. causal: keys of the future are not attended. scale: of the products of queries and keys. dropout_p:
    the share of the probabilities that is dropped, in [0, 1).
    """

    index: BlockIndex
    key_bias: Tensor | None
    bias: Tensor | None
    seed: Tensor
    causal: bool
    scale: float
    dropout_p: float


class Heads(NamedTuple):
    """A tensor [B, H, S, D] whose columns lie side by side: its memory, and the strides of samples, heads and rows."""

    memory: Any
    batch: Any
    head: Any
    row: Any


class Sizes(NamedTuple):
    """Of q [B, heads, queries, width] and k [B, heads, keys, width]."""

    heads: Any
    queries: Any
    keys: Any
    width: Any
