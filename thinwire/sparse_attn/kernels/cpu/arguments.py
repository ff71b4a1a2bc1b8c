"""What the compiled loops are given, in named tuples; matrices lie in flat memory, strides are in elements."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.simd.products import Matrix

__all__ = [
    "Biases",
    "Blocks",
    "Dropout",
    "Floats",
    "Head",
    "HeadDropout",
    "Heads",
    "Integers",
    "Rows",
    "Scores",
    "Sizes",
    "Tile",
]

Floats = NDArray[np.float32]
Integers = NDArray[np.int32]


class Heads(NamedTuple):
    """A tensor [B, H, S, D] whose columns lie side by side: the strides of samples, heads and rows.

    Without the first two strides, one matrix [S, D] that stands for every head.
    """

    values: Floats
    batch: int
    head: int
    row: int


class Rows(NamedTuple):
    """A matrix: row i begins at i * stride."""

    values: Floats
    stride: int


class Blocks(NamedTuple):
    """A block index: `num_rows` rows a head, or the same rows for every head where `heads` is 1."""

    row_offsets: Integers
    columns: Integers
    heads: int
    num_rows: int
    block: int


class Sizes(NamedTuple):
    """Of q [B, heads, queries, width] and k [B, heads, keys, width]."""

    heads: int
    queries: int
    keys: int
    width: int


class Biases(NamedTuple):
    """What is added to scores, both empty where there is none: [B, Sk], and [B|1, H|1, Sq, Sk] with its strides, of
    which one is 0 where one sample or head serves all."""

    keys: Floats
    pairs: Floats
    batch: int
    head: int
    row: int
    column: int


class Dropout(NamedTuple):
    """Each head's key of the hash, none where nothing is dropped, the smallest hash that is kept, and the factor of
    what is kept."""

    head_keys: NDArray[np.uint32]
    threshold: np.uint32
    kept: np.float32


class Scores(NamedTuple):
    """Which scores there are and what is done to them; `causal`: no key of the future is attended."""

    blocks: Blocks
    sizes: Sizes
    biases: Biases
    dropout: Dropout
    causal: bool
    scale: np.float32


class HeadDropout(NamedTuple):
    """`Dropout` of one head; a threshold of 0 drops nothing."""

    key: np.uint32
    threshold: np.uint32
    kept: np.float32


class Head(NamedTuple):
    """What of `Scores` is about one head of one sample: its rows of blocks, its biases, both empty where there is none,
    and its dropout."""

    row_offsets: Integers
    key_bias: Floats
    bias: Matrix
    dropout: HeadDropout


class Tile(NamedTuple):
    """Queries that lie across the lanes of vectors: the first one's number, how many, and lanes for them."""

    first: int
    queries: int
    lanes: int
