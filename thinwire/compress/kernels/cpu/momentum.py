"""The inner loops of the CPU backend over a momentum kept as sign1 packets, on a range of elements of its bucket.

Elements are taken sixteen at a time where the packet's bits fill two bytes; a group of which the range covers
only a part goes through a scratch of sixteen, so that there is one way to calculate an element.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from thinwire.compress.kernels.cpu.blocks import Bytes, Floats, Layout, Range, locate
from thinwire.compress.kernels.cpu.small_floats import (
    ELEMENT_BYTES,
    Values,
    random_bits,
    round_and_store,
    some_of,
    widen,
)
from thinwire.simd import floats, integers
from thinwire.simd.compiling import helper, kernel
from thinwire.simd.floats import LANES

__all__ = ["Factors", "Preconditioner", "Step", "apply_signs", "momentum_payload"]


class Preconditioner(NamedTuple):
    """A code for each element, and what each of the 256 codes stands for."""

    codes: Bytes
    table: Floats


class Factors(NamedTuple):
    """Of the last momentum, of the gradient, and what the gradient is divided by."""

    beta1: np.float32
    gain: np.float32
    loss_scale: np.float32


class Step(NamedTuple):
    """The size of the step, the factor of the weights, and the two keys of their rounding's seed."""

    lr: np.float32
    decay: np.float32
    first_key: np.uint32
    second_key: np.uint32


@kernel
def momentum_payload(
    packets: Bytes,
    layout: Layout,
    gradient: Values,
    preconditioner: Preconditioner,
    payload: Floats,
    factors: Factors,
    first: int,
    streaming: bool,
    blocks: Range,
) -> None:
    """Elements first, first + 1, ... as far as they lie in the given blocks; see `reference.momentum_payload`."""
    values, kind = gradient
    codes, table = preconditioner
    size = ELEMENT_BYTES[kind]
    scratch = np.empty(LANES, dtype=np.float32)
    for block in range(blocks.first, blocks.last):
        place = locate(layout, block, 1)
        kept = floats.load_scalar(packets, place.scale_at) * factors.beta1
        start = block * layout.block_size - first  # where the block begins in the arrays
        begin, end, whole, behind, parts = _groups(start, layout.block_size, codes.size)
        for i in range(whole, behind, LANES):
            signs = floats.load_bits(packets, place.codes + i // 8)
            value = _payload(values, kind, codes, table, start + i, signs, kept, factors)
            if streaming:
                floats.stream(payload, start + i, value)
            else:
                floats.store(payload, start + i, value)
        for i in parts:
            at, low, high = start + i, max(begin - i, 0), min(end - i, LANES)
            if 0 < high - low < LANES:
                signs = floats.load_bits(packets, place.codes + i // 8)
                some, some_codes = some_of(values, at, low, high, size), some_of(codes, at, low, high, 1)
                floats.store(scratch, 0, _payload(some, kind, some_codes, table, 0, signs, kept, factors))
                payload[at + low : at + high] = scratch[low:high]
    if streaming:
        floats.drain_streams()


@kernel
def apply_signs(
    packets: Bytes, layout: Layout, weights: Values, codes: Bytes, step: Step, first: int, blocks: Range
) -> None:
    """Elements first, first + 1, ... as far as they lie in the given blocks; see `reference.apply_signs`."""
    values, kind = weights
    size = ELEMENT_BYTES[kind]
    for block in range(blocks.first, blocks.last):
        place = locate(layout, block, 1)
        magnitude = floats.load_scalar(packets, place.scale_at) * step.lr
        start = block * layout.block_size - first  # where the block begins in the arrays
        begin, end, whole, behind, parts = _groups(start, layout.block_size, codes.size)
        for i in range(whole, behind, LANES):
            signs = floats.load_bits(packets, place.codes + i // 8)
            random = random_bits(first + start + i, step.first_key, step.second_key)
            _step(values, kind, codes, start + i, signs, magnitude, step.decay, random)
        for i in parts:
            at, low, high = start + i, max(begin - i, 0), min(end - i, LANES)
            if 0 < high - low < LANES:
                signs = floats.load_bits(packets, place.codes + i // 8)
                some, some_codes = some_of(values, at, low, high, size), some_of(codes, at, low, high, 1)
                random = random_bits(first + at, step.first_key, step.second_key)
                _step(some, kind, some_codes, 0, signs, magnitude, step.decay, random)
                values[(at + low) * size : (at + high) * size] = some[low * size : high * size]


@helper
def _groups(start: int, block_size: int, numel: int) -> tuple[int, int, int, int, range]:
    """Places in a block that begins at index `start`: begin and end of what lies among `numel` elements; begin and end
    of the groups of sixteen that all do; and where groups may begin of which a part does."""
    begin, end = max(-start, 0), min(numel - start, block_size)
    head, behind = begin // LANES * LANES, end // LANES * LANES
    whole = (begin + LANES - 1) // LANES * LANES
    parts = range(head, behind + 1, max(behind - head, 1)) if (begin | end) % LANES else range(0, 0, 1)
    return begin, end, whole, behind, parts


@helper
def _payload(
    gradient: Bytes,
    kind: int,
    codes: Bytes,
    table: Floats,
    at: int,
    signs: floats.Scalar,
    kept: np.float32,
    factors: Factors,
) -> floats.Vector:
    """Sixteen elements from number `at` of the arrays on."""
    moving = _moving(codes, at)
    factor = floats.select(moving, integers.look_up(table, codes, at), floats.broadcast(np.float32(0.0)))
    change = floats.divide(widen(gradient, at, kind), floats.broadcast(factors.loss_scale))
    change = floats.multiply(floats.multiply(floats.broadcast(factors.gain), change), factor)
    return floats.add(_signed(signs, moving, kept), change)


@helper
def _step(
    weights: Bytes,
    kind: int,
    codes: Bytes,
    at: int,
    signs: floats.Scalar,
    magnitude: np.float32,
    decay: np.float32,
    random: integers.Integers,
) -> None:
    """Sixteen elements from index `at` of the arrays on."""
    moved = _signed(signs, _moving(codes, at), magnitude)
    value = floats.multiply(widen(weights, at, kind), floats.broadcast(decay))
    round_and_store(weights, at, kind, floats.subtract(value, moved), random)


@helper
def _moving(codes: Bytes, at: int) -> floats.Scalar:
    """Bit k is set where code at + k is not 0."""
    zero = integers.broadcast(np.uint32(0))
    return integers.below(zero, integers.load_8_bits(codes, at))


@helper
def _signed(signs: floats.Scalar, moving: floats.Scalar, magnitude: np.float32) -> floats.Vector:
    """± magnitude, and 0 where nothing moves."""
    value = floats.select(signs, floats.broadcast(magnitude), floats.broadcast(-magnitude))
    return floats.select(moving, value, floats.broadcast(np.float32(0.0)))
