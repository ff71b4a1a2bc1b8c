"""Plans: from blocks of any size to the tiles that tensor cores like; which tiles each program takes, which of them
need masks, and how long rows are shared out so that no program works alone at the end; and the kernels' arguments in
named tuples, each of which becomes plain ones when Triton compiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from thinwire.sparse_attn.block_index import BlockIndex

ITEM = 6
"""Numbers of an item: head, tile, its first entry, the one after its last, the first that needs no mask, slot or -1."""

_LONGEST = 32  # tiles that one program takes


class Work(NamedTuple):
    """What programs do that walk along rows of tiles (or columns), all int32 on the kernels' device.

    `items` [n, ITEM]: a row or, where it is long, a part of one with a slot of its own for what it adds up.
    `entries` [nnz], `masks` [nnz]: of each tile of a row the column, and which of its blocks are attended, a bit each.
    `merges` [m, 4]: head, row, first slot and slots of each long row. `slots`: of all of them.
    """

    items: Tensor
    entries: Tensor
    masks: Tensor
    merges: Tensor
    slots: int


def plan(index: BlockIndex, heads: int, lengths: tuple[int, int], tile: int, *, causal: bool) -> tuple[Work, Work]:
    """Along rows of queries, for the forward and the gradients of queries; and along columns of keys, for theirs.

    `lengths`: of queries and keys. `tile`: tokens of a tile, a multiple of the block, whose blocks are then joined, or
    a divisor. Tiles wholly in the future are left out where `causal`.
    """
    rows, columns = (-(-length // tile) for length in lengths)
    head, row, column = index.to("cpu").places
    if tile < index.block:
        head, row, column = _split(head, row, column, index.block // tile, rows, columns)
    joined = max(1, tile // index.block)
    bits = 1 << (row % joined * joined + column % joined)
    place = (head * rows + row // joined) * columns + column // joined
    places, inverse = torch.unique(place, return_inverse=True)
    masks = torch.zeros_like(places).scatter_add_(0, inverse, bits)
    line, column = places // max(columns, 1), places % max(columns, 1)
    head, row = line // max(rows, 1), line % max(rows, 1)
    if causal:
        past = column <= row
        head, row, column, masks = head[past], row[past], column[past], masks[past]
    whole = (masks == (1 << joined * joined) - 1) & ~((column == columns - 1) & (lengths[1] % tile != 0))
    if causal:
        whole &= column < row
    return (
        _walk(index, heads, rows, head, row, column, masks, whole),
        _walk(index, heads, columns, head, column, row, masks, whole),
    )


_made: Any = WeakTensorKeyDictionary()


def kept_plan(index: BlockIndex, heads: int, lengths: tuple[int, int], tile: int, *, causal: bool) -> tuple[Work, Work]:
    """`plan`, made once for as long as the index lives."""
    of_index: dict[Any, tuple[Work, Work]] = _made.setdefault(index.row_offsets, {})
    key = (heads, lengths, tile, causal)
    if key not in of_index:
        of_index[key] = plan(index, heads, lengths, tile, causal=causal)
    return of_index[key]


def _split(
    head: Tensor, row: Tensor, column: Tensor, parts: int, rows: int, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The tiles of blocks that are `parts` tiles wide, those beyond the last row or column left out."""
    down, across = torch.meshgrid(torch.arange(parts), torch.arange(parts), indexing="ij")
    row = (row[:, None] * parts + down.reshape(-1)).reshape(-1)
    column = (column[:, None] * parts + across.reshape(-1)).reshape(-1)
    inside = (row < rows) & (column < columns)
    return head.repeat_interleave(parts * parts)[inside], row[inside], column[inside]


def _walk(
    index: BlockIndex, heads: int, lines: int, head: Tensor, line: Tensor, entry: Tensor, masks: Tensor, whole: Tensor
) -> Work:
    """Work along `lines`; tiles that need masks come first in each."""
    width, device = int(entry.max()) + 1 if entry.numel() else 1, index.columns.device
    of_line = head * lines + line
    order = torch.argsort((of_line * 2 + whole) * width + entry)
    counts = torch.bincount(of_line, minlength=index.num_heads * lines)
    masked = torch.bincount(of_line[~whole], minlength=index.num_heads * lines)
    ends = counts.cumsum(0)
    starts = ends - counts
    items: list[list[int]] = []
    merges: list[list[int]] = []
    slots = 0
    described = torch.stack([starts, ends, starts + masked], 1).tolist()
    for one in range(heads):
        for number in range(lines):
            start, end, unmasked = described[(one if index.num_heads > 1 else 0) * lines + number]
            parts = max(1, -(-(end - start) // _LONGEST))
            if parts > 1:
                merges.append([one, number, slots, parts])
            for part in range(parts):
                edges = [start + (end - start) * edge // parts for edge in (part, part + 1)]
                items.append([one, number, *edges, unmasked, slots + part if parts > 1 else -1])
            slots += parts if parts > 1 else 0
    return Work(
        torch.tensor(items, dtype=torch.int32).view(-1, ITEM).to(device),
        entry[order].int().to(device),
        masks[order].int().to(device),
        torch.tensor(merges, dtype=torch.int32).view(-1, 4).to(device),
        slots,
    )


class Rows(NamedTuple):
    """A matrix [length, width] in memory, whose rows lie `stride` elements apart."""

    memory: Any
    stride: Any
    length: Any
    width: Any


class Dropout(NamedTuple):
    """int64 [1] seed, the smallest 32-bit hash that is kept, and the factor of what is kept."""

    seed: Any
    threshold: Any
    kept: Any


class Config(NamedTuple):
    """What a kernel is compiled for, each a `tl.constexpr`: what is done to scores, and tokens and columns of a tile.

    BLOCK: tokens of the layout's blocks. T: tokens of a tile. STEP: how many of a tile's tokens are taken at a time
    along a row or column of tiles; it divides T. WIDTH: columns, a power of two.
    """

    CAUSAL: Any
    HAS_KEY_BIAS: Any
    HAS_BIAS: Any
    DROPOUT: Any
    BLOCK: Any
    T: Any
    STEP: Any
    WIDTH: Any


class Item(NamedTuple):
    """One program's item, as `plan.Work` describes, and its sample: all scalars in a kernel."""

    batch: Any
    head: Any
    first: Any
    start: Any
    end: Any
    unmasked: Any
    slot: Any


class Head(NamedTuple):
    """In a kernel, what the scores of one head of one sample depend on besides its rows.

    number: of the head, counted sample by sample. scale: in exponents of two. walk: says of tiles where they are.
    """

    number: Any
    queries: Any
    keys: Any
    key_bias: Any
    bias: Any
    bias_row: Any
    bias_column: Any
    scale: Any
    dropout: Any
    walk: Any
