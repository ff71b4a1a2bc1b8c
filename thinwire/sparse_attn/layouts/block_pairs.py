"""The shapes that layouts are made of, as pairs of block rows and columns: each costs what it holds, not all blocks."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch

from thinwire.sparse_attn.block_index import BlockPairs

__all__ = ["all_blocks", "global_columns", "global_rows", "join", "local_windows", "lower", "random_blocks", "sliding"]


def join(parts: Iterable[BlockPairs]) -> BlockPairs:
    """All pairs of all parts."""
    rows, columns = zip(*parts, strict=True)
    return torch.cat(rows), torch.cat(columns)


def lower(pairs: BlockPairs) -> BlockPairs:
    """Those on or below the diagonal: no block of the future."""
    rows, columns = pairs
    keep = columns <= rows
    return rows[keep], columns[keep]


def all_blocks(num_rows: int, num_columns: int) -> BlockPairs:
    """Every block."""
    rows, columns = torch.meshgrid(torch.arange(num_rows), torch.arange(num_columns), indexing="ij")
    return rows.reshape(-1), columns.reshape(-1)


def local_windows(blocks: int, sizes: Sequence[int]) -> BlockPairs:
    """Squares along the diagonal, of these sizes in turn, the last of which repeats to the end."""
    windows: list[torch.Tensor] = []
    start = 0
    while start < blocks:
        size = sizes[min(len(windows), len(sizes) - 1)]
        windows.append(torch.arange(start, min(start + size, blocks)))
        start += size
    rows = torch.cat([window.repeat_interleave(len(window)) for window in windows])
    columns = torch.cat([window.repeat(len(window)) for window in windows])
    return rows, columns


def sliding(blocks: int, width: int) -> BlockPairs:
    """A band of `width` blocks around the diagonal, one more where `width` is even, cut at the edges."""
    half = width // 2
    rows, shifts = torch.meshgrid(torch.arange(blocks), torch.arange(-half, half + 1), indexing="ij")
    columns = rows + shifts
    inside = (columns >= 0) & (columns < blocks)
    return rows[inside], columns[inside]


def global_columns(blocks: int, columns: Sequence[int]) -> BlockPairs:
    """Columns that every row attends."""
    return torch.arange(blocks).repeat_interleave(len(columns)), torch.tensor(columns, dtype=torch.int64).repeat(blocks)


def global_rows(blocks: int, rows: Sequence[int]) -> BlockPairs:
    """Rows that attend every column."""
    columns, transposed = global_columns(blocks, rows)
    return transposed, columns


def random_blocks(blocks: int, count: int, taken: BlockPairs, generator: random.Random, *, causal: bool) -> BlockPairs:
    """`count` blocks a row beside those `taken`, or as many as are left; none above the diagonal if `causal`."""
    taken_rows, taken_columns = taken
    order = torch.argsort(taken_rows)
    counts = torch.bincount(taken_rows, minlength=blocks).tolist()
    of_rows = torch.split(taken_columns[order], counts)
    rows, columns = [], []
    for row, of_row in enumerate(of_rows):
        covered = set(of_row.tolist())
        reachable = row + 1 if causal else blocks
        # Of so many different ones at least `count`, or all that are left, are not covered.
        drawn = generator.sample(range(reachable), min(reachable, count + len(covered)))
        fresh = [column for column in drawn if column not in covered][:count]
        rows += [row] * len(fresh)
        columns += fresh
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(columns, dtype=torch.int64)
