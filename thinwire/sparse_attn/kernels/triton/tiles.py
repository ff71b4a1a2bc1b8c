"""Parts that the Triton kernels share: which tiles a program takes, where they lie in memory, a tile's scores with
all masks, dropout, and values made safe to multiply by zero."""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.sparse_attn.kernels.triton.plan import Head, Item, Rows


@triton.jit
def load_item(walk, config):
    """The item of this program: `first` is its first token, and its entries are counted in steps."""
    steps: tl.constexpr = config.T // config.STEP
    item = walk.items + tl.program_id(0) * 6
    batch = tl.program_id(1).to(tl.int64)
    return Item(
        batch=batch,
        head=tl.load(item).to(tl.int64),
        first=tl.load(item + 1) * config.T,
        start=tl.load(item + 2) * steps,
        end=tl.load(item + 3) * steps,
        unmasked=tl.load(item + 4) * steps,
        slot=tl.load(item + 5),
    )


@triton.jit
def rows_of(heads, batch, head, length, width):
    """The rows of one head of one sample."""
    first = batch * heads.batch + head * heads.head
    return Rows(memory=heads.memory + first, stride=heads.row, length=length, width=width)


@triton.jit
def part_of(parts, number, config):
    """The rows of one of `parts`, [n, T, WIDTH]."""
    first = number * config.T * config.WIDTH
    return Rows(memory=parts + first, stride=config.WIDTH, length=config.T, width=config.WIDTH)


@triton.jit
def this_head(item, walk, sizes, biases, dropout, scale):
    """What the scores of an item's head depend on."""
    return Head(
        number=item.batch * sizes.heads + item.head,
        queries=sizes.queries,
        keys=sizes.keys,
        key_bias=biases.keys + item.batch * sizes.keys,
        bias=biases.pairs + item.batch * biases.batch + item.head * biases.head,
        bias_row=biases.row,
        bias_column=biases.column,
        scale=scale,
        dropout=dropout,
        walk=walk,
    )


@triton.jit
def first_of(entry, walk, config):
    """The first token of the STEP tokens that make one step of a walk: T / STEP steps are a tile."""
    steps: tl.constexpr = config.T // config.STEP
    tile = entry // steps
    return tl.load(walk.entries + tile) * config.T + (entry - tile * steps) * config.STEP


@triton.jit
def mask_of(entry, walk, config):
    """Which blocks of a step's tile are attended, a bit each."""
    return tl.load(walk.masks + entry // (config.T // config.STEP))


@triton.jit
def _places(matrix, first, COUNT: tl.constexpr, config):
    """Of [COUNT, WIDTH] from row `first` on, where they lie, and which of them are inside of the matrix."""
    rows = first + tl.arange(0, COUNT)
    columns = tl.arange(0, config.WIDTH)
    inside = (rows[:, None] < matrix.length) & (columns[None, :] < matrix.width)
    return matrix.memory + rows[:, None].to(tl.int64) * matrix.stride + columns[None, :], inside


@triton.jit
def load_rows(matrix, first, COUNT: tl.constexpr, config):
    """[COUNT, WIDTH] from row `first` on, zeros beyond the matrix."""
    place, inside = _places(matrix, first, COUNT, config)
    return tl.load(place, mask=inside, other=0.0)


@triton.jit
def load_finite_rows(matrix, first, COUNT: tl.constexpr, config):
    """`load_rows` with zeros for what is not finite, and which rows held such, 1 or 0.

    Memory is read twice: a tile cleaned in registers would be held whole by every warp that multiplies with it.
    """
    place, inside = _places(matrix, first, COUNT, config)
    finite = tl.abs(tl.load(place, mask=inside, other=0.0).to(tl.float32)) < float("inf")
    bad = tl.max(tl.where(finite, 0, 1), 1)
    return tl.load(place, mask=inside & finite, other=0.0), bad


@triton.jit
def store_rows(matrix, values, first, config):
    """The opposite of `load_rows`, in the memory's dtype."""
    place, inside = _places(matrix, first, config.T, config)
    tl.store(place, values.to(matrix.memory.dtype.element_ty), mask=inside)


@triton.jit
def _mix(word):
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D
    word = word ^ (word >> 15)
    word = word * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def keep_mask(head, rows, columns):
    """What dropout keeps of a tile of one head; `thinwire.sparse_attn.reference` in 32 bits."""
    value = tl.load(head.dropout.seed)
    low = (value & 0xFFFFFFFF).to(tl.uint32)
    high = ((value >> 32) & 0xFFFFFFFF).to(tl.uint32)
    golden = tl.full([], 0x9E3779B9, tl.uint32)
    head_key = _mix(low ^ _mix(high + head.number.to(tl.uint32) * golden))
    row_keys = _mix(head_key + rows.to(tl.uint32))
    words = _mix(row_keys ^ (columns.to(tl.uint32) * golden))
    return words >= head.dropout.threshold


@triton.jit
def attended_scores(scores, rows, columns, mask, head, config, MASKED: tl.constexpr):
    """Exponents of two with the biases in; -inf where a query does not attend a key, whatever the score was.

    rows, columns: of queries and of keys, [T, 1] and [1, T], or [1, T] and [T, 1] where scores are the transpose.
    mask: which of the tile's blocks are attended, a bit each; not looked at without MASKED.
    """
    log2_e: tl.constexpr = 1.4426950408889634
    if config.HAS_KEY_BIAS:
        added = tl.load(head.key_bias + columns, mask=columns < head.keys, other=0.0)
        scores = tl.where(added == float("-inf"), float("-inf"), scores + added * log2_e)
    if config.HAS_BIAS:
        place = head.bias + rows.to(tl.int64) * head.bias_row + columns.to(tl.int64) * head.bias_column
        added = tl.load(place, mask=(rows < head.queries) & (columns < head.keys), other=0.0)
        scores = tl.where(added == float("-inf"), float("-inf"), scores + added * log2_e)
    if MASKED:
        attends = columns < head.keys
        if config.CAUSAL:
            attends = attends & (columns <= rows)
        if config.BLOCK < config.T:
            joined: tl.constexpr = config.T // config.BLOCK
            bit = (rows % config.T) // config.BLOCK * joined + (columns % config.T) // config.BLOCK
            attends = attends & (((mask >> bit) & 1) != 0)
        scores = tl.where(attends, scores, float("-inf"))
    return scores


@triton.jit
def not_finite(values):
    """Whether anything in a tile is infinite or NaN: one answer for the whole program."""
    zero = tl.sum(tl.sum(values * 0.0, 1), 0)
    return zero != zero


@triton.jit
def product(left, right):
    """left right, float32."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def add_product(left, right, total):
    """total + left right, float32."""
    return tl.dot(left, right, total, input_precision="tf32x3")
