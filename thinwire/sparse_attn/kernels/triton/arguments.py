"""What the Triton kernels are given, in named tuples: each becomes plain kernel arguments when Triton compiles."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Biases", "Config", "Dropout", "Head", "Heads", "Item", "Rows", "Sizes", "Walk"]


class Heads(NamedTuple):
    """A tensor [B, H, S, D] whose columns lie side by side: its memory, and its strides in elements."""

    memory: Any
    batch_stride: Any
    head_stride: Any
    row_stride: Any

    @classmethod
    def of(cls, tensor: Tensor) -> Heads:
        """`tensor` as kernels take it."""
        return cls(tensor, *tensor.stride()[:3])


class Rows(NamedTuple):
    """A matrix [length, width] in memory, whose rows lie `stride` elements apart."""

    memory: Any
    stride: Any
    length: Any
    width: Any


class Biases(NamedTuple):
    """What is added to scores: float32 [B, Sk] for keys and [B|1, H|1, Sq, Sk] for pairs, with the latter's strides in
    elements, 0 where one sample or head serves all. What `Config` says is not there is never read."""

    keys: Any
    pairs: Any
    batch_stride: Any
    head_stride: Any
    row_stride: Any
    column_stride: Any

    @classmethod
    def of(cls, keys: Tensor | None, pairs: Tensor | None, nothing: Tensor) -> Biases:
        """The biases as kernels take them; any tensor, `nothing`, stands for one that is None."""
        keys = nothing if keys is None else keys.contiguous()
        if pairs is None:
            return cls(keys, nothing, 0, 0, 0, 0)
        batch, head, row, column = pairs.stride()
        return cls(keys, pairs, batch if pairs.size(0) > 1 else 0, head if pairs.size(1) > 1 else 0, row, column)


class Dropout(NamedTuple):
    """int64 [1] seed, the smallest 32-bit hash that is kept, and the factor of what is kept."""

    seed: Any
    threshold: Any
    kept: Any


class Sizes(NamedTuple):
    """Of q [B, heads, queries, width] and k [B, heads, keys, width]."""

    heads: Any
    queries: Any
    keys: Any
    width: Any


class Walk(NamedTuple):
    """Along which tiles programs walk, as `plan.Work` describes: int32 [n, ITEM], [nnz] and [nnz], and a number."""

    items: Any
    entries: Any
    masks: Any
    slots: Any


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

    number: of the head, counted sample by sample. scale: in exponents of two.
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
