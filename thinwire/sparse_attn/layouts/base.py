"""The base of every layout: numbers of heads and tokens a block, the mask that users know, and the compact index that
kernels read, made once for each length; and the shapes that layouts are made of, as pairs of block rows and columns:
each costs what it holds, not all blocks; and a picture of a pattern."""

from __future__ import annotations

import math
import operator
import random
import reprlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from thinwire.sparse_attn.block_index import BlockIndex, BlockPairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


SUPPORTED_BLOCKS = (16, 32, 64, 128)
"""Tokens a block that the kernels are written for."""

_KEPT_INDICES = 16


@dataclass(frozen=True)
class Layout:
    """Immutable: what it holds for a length never changes, so each length's index is made once and kept.

    `num_heads`: of the attention, or 1 for any number of heads alike. `block`: tokens a block, 16, 32,
    64 or 128. `different_layout_per_head`: let patterns that differ between heads, random ones say, do so.
    """

    # Options that count blocks, and the least of each; of those of one row a sequence must have as many.
    _least: ClassVar[Mapping[str, int]] = {}
    _counted_in_a_row: ClassVar[tuple[str, ...]] = ()

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False
    _indices: OrderedDict[Any, BlockIndex] = field(
        default_factory=OrderedDict, init=False, repr=False, compare=False, kw_only=True
    )
    _content: str = field(default="", init=False, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block not in SUPPORTED_BLOCKS:
            sizes = ", ".join(map(str, SUPPORTED_BLOCKS))
            raise ValueError(
                f"block must be one of {sizes} tokens, which the kernels are written for, got "
                f"{reprlib.repr(self.block)}"
            )
        for name, value in vars(self).items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        options = vars(self)
        for name in {"different_layout_per_head", "horizontal_global_attention"} & options.keys():
            if not isinstance(options[name], bool):
                raise ValueError(f"{name} must be True or False, got {reprlib.repr(options[name])}")
        known_attention(options.get("attention", "bidirectional"), options.get("horizontal_global_attention", False))
        for name, least in {"num_heads": 1, **self._least}.items():
            if type(options[name]) is not int or options[name] < least:
                raise ValueError(
                    f"{name} must be a whole number of at least {least}, got {reprlib.repr(options[name])}"
                )
        if type(options.get("seed", 0)) is not int:
            raise ValueError(f"seed must be a whole number, got {reprlib.repr(options['seed'])}")
        if "global_block_indices" in options:
            _check_global_ranges(options["global_block_indices"], options["global_block_end_indices"])
        object.__setattr__(self, "_content", repr(self))

    @property
    def causal(self) -> bool:
        """Whether no token attends a later one."""
        return getattr(self, "attention", "bidirectional") == "unidirectional"

    def fits(self, seq_len: int) -> bool:
        """Whether `seq_len` tokens have as many blocks as the pattern puts into a row. `Custom` knows one length only,
        which it checks by itself."""
        blocks = math.ceil(seq_len / self.block)
        return all(getattr(self, name) <= blocks for name in self._counted_in_a_row)

    def make_layout(self, seq_len: int) -> Tensor:
        """The blocks of `seq_len` tokens, a multiple of `block`, as int64 [num_heads, blocks, blocks] of 0 and 1.

        A unidirectional layout's diagonal blocks are 1; attention cuts them to the token. Raises ValueError for another
        number of tokens, or where the pattern does not fit.
        """
        if seq_len < 1 or seq_len % self.block:
            raise ValueError(
                f"make_layout() takes a positive multiple of the block, {self.block} tokens, got {seq_len}: pad the "
                "sequence; block_sparse_attention itself takes any length"
            )
        mask = self.index(seq_len).dense().long()
        return mask.expand(self.num_heads, -1, -1).contiguous()

    def index(self, query_length: int, key_length: int | None = None, device: torch.device | str = "cpu") -> BlockIndex:
        """The blocks of this many tokens, the last block cut short where they do not fill it.

        Raises ValueError where the pattern does not fit, or the numbers of queries and keys differ but in a Custom
        layout.
        """
        keys = query_length if key_length is None else key_length
        # A compiled graph holds the index of one length: a symbolic one becomes a number here.
        key = (operator.index(query_length), operator.index(keys), torch.device(device))
        if torch.compiler.is_compiling():
            constant: BlockIndex = self._constant_index(self._content, *key)
            return constant
        return self._kept_index(*key)

    def __getstate__(self) -> dict[str, Any]:
        """Without the indices: a copy makes its own, on whatever device it finds itself."""
        return {**vars(self), "_indices": OrderedDict()}

    def plot(self, seq_len: int) -> Axes:
        """Draw the blocks of `seq_len` tokens: rows of queries down, columns of keys across, darker where more heads
        attend; returns matplotlib's axes. Raises ImportError where matplotlib is missing."""
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("drawing a layout needs matplotlib: pip install matplotlib") from error
        index = self.index(seq_len)
        _, axes = plt.subplots(figsize=(5, 5))
        axes.imshow(index.dense().float().mean(0).numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.set_xlabel(f"keys, blocks of {index.block}")
        axes.set_ylabel(f"queries, blocks of {index.block}")
        axes.set_title(f"{type(self).__name__} attends {100 * index.density():.1f}% of {seq_len} x {seq_len}")
        return axes

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _constant_index(self, content: str, query_length: int, key_length: int, device: torch.device) -> BlockIndex:
        # torch.compile guards what is passed, and nothing else of the layout.
        return self._kept_index(query_length, key_length, device)

    def _kept_index(self, query_length: int, key_length: int, device: torch.device) -> BlockIndex:
        key = (query_length, key_length, device)
        if key in self._indices:
            self._indices.move_to_end(key)
            return self._indices[key]
        # Kept tensors outlive the caller's modes: made in inference mode, no later training could use them.
        with torch.inference_mode(False), torch.device("cpu"):
            index = self._make_index(query_length, key_length).to(device)
        self._indices[key] = index
        if len(self._indices) > _KEPT_INDICES:
            self._indices.popitem(last=False)
        return index

    def _pairs(self, head: int, blocks: int) -> BlockPairs:
        raise NotImplementedError(f"{type(self).__name__} is no layout of its own: use one of the others, or Custom")

    def _blocks_of(self, query_length: int, key_length: int) -> tuple[int, int]:
        if self.causal and query_length != key_length:
            raise ValueError(
                f"a unidirectional layout needs as many queries as keys, got {query_length} and {key_length}"
            )
        return math.ceil(query_length / self.block), math.ceil(key_length / self.block)

    def _make_index(self, query_length: int, key_length: int) -> BlockIndex:
        rows, columns = self._blocks_of(query_length, key_length)
        square = rows == columns
        if not square and not hasattr(self, "block_mask"):
            raise ValueError(
                f"{type(self).__name__} is for queries and keys of one sequence, got {query_length} queries and "
                f"{key_length} keys: use a Custom layout for cross-attention"
            )
        if rows == 0 or columns == 0:
            nothing = torch.zeros(0, dtype=torch.int64)
            return BlockIndex.from_pairs(self.block, rows, columns, [(nothing, nothing)])
        for name in self._counted_in_a_row:
            if getattr(self, name) > rows:
                raise ValueError(
                    f"{type(self).__name__} has {name}={getattr(self, name)}, but the sequence has {rows} blocks of "
                    f"{self.block} tokens: pad it to {getattr(self, name) * self.block} tokens, or choose less"
                )
        heads = self.num_heads if self.different_layout_per_head else 1
        pairs = [self._pairs(head, rows) for head in range(heads)]
        if self.causal:
            pairs = [lower(one) for one in pairs]
        return BlockIndex.from_pairs(self.block, rows, columns, pairs)


def known_attention(attention: str, horizontal: bool = False) -> None:
    """Raise ValueError for an unknown direction, or for rows of the future in a unidirectional layout."""
    if attention not in ("bidirectional", "unidirectional"):
        raise ValueError(f'attention must be "bidirectional" or "unidirectional", got {reprlib.repr(attention)}')
    if horizontal and attention == "unidirectional":
        raise ValueError(
            "horizontal_global_attention lets rows attend all columns, later ones too: it needs "
            'attention="bidirectional"'
        )


def _check_global_ranges(first: Sequence[int], end: Sequence[int] | None) -> None:
    _whole_numbers("global_block_indices", first)
    if end is None:
        end = [start + 1 for start in first]
    _whole_numbers("global_block_end_indices", end)
    if len(end) != len(first):
        raise ValueError(
            f"global_block_end_indices must pair with global_block_indices, got {len(end)} for {len(first)}"
        )
    for start, stop in zip(first, end, strict=True):
        if start < 0 or stop <= start:
            raise ValueError(f"global blocks must be ranges from 0 on, got {start} to {stop}")


def global_ranges(first: Sequence[int], end: Sequence[int] | None, blocks: int) -> list[int]:
    """The global blocks, those beyond `blocks` left out: a sequence may be shorter than the longest."""
    ends = [start + 1 for start in first] if end is None else end
    return [column for start, stop in zip(first, ends, strict=True) for column in range(start, min(stop, blocks))]


def _whole_numbers(name: str, values: object) -> None:
    if not isinstance(values, Sequence) or any(type(value) is not int for value in values):
        raise ValueError(f"{name} must list whole numbers, got {reprlib.repr(values)}")
