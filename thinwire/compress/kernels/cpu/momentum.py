"""The inner loops of the CPU backend over a momentum kept as sign1 packets, on a range of elements of its bucket.

Elements are taken sixteen at a time where the packet's bits fill two bytes; a group of which the range covers
only a part goes through a scratch of sixteen, so that there is one way to calculate an element.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.compress.kernels.cpu.blocks import locate
from thinwire.compress.kernels.cpu.halves import ELEMENT_BYTES, round_and_store, widen
from thinwire.compress.kernels.cpu.noise import random_bits
from thinwire.simd import floats, integers
from thinwire.simd.compiling import helper, kernel
from thinwire.simd.floats import LANES

__all__ = ["apply_signs", "momentum_payload"]

_Floats = NDArray[np.float32]
_Bytes = NDArray[np.uint8]


@helper
def _ranges(block: int, block_size: int, first: int, numel: int) -> tuple[int, int, int, int]:
    """Indices of a block's elements among `numel` from number `first` on: begin, whole groups' begin and end, end."""
    begin, end = max(first, block * block_size), min(first + numel, block * block_size + block_size)
    whole = min((begin + LANES - 1) // LANES * LANES, end)
    behind = max(end // LANES * LANES, whole)
    return begin - first, whole - first, behind - first, end - first


@helper
def _moving(codes: _Bytes, at: int) -> floats.Scalar:
    """Bit k is set where code at + k is not 0."""
    zero = integers.broadcast(np.uint32(0))
    return integers.below(zero, integers.load_8_bits(codes, at))


@helper
def _signed(signs: floats.Scalar, moving: floats.Scalar, magnitude: np.float32) -> floats.Vector:
    """± magnitude, and 0 where nothing moves."""
    value = floats.select(signs, floats.broadcast(magnitude), floats.broadcast(-magnitude))
    return floats.select(moving, value, floats.broadcast(np.float32(0.0)))


@helper
def _payload(
    gradient: _Bytes,
    codes: _Bytes,
    table: _Floats,
    at: int,
    kind: int,
    signs: floats.Scalar,
    kept: np.float32,
    gain: np.float32,
    loss_scale: np.float32,
) -> floats.Vector:
    moving = _moving(codes, at)
    preconditioner = floats.select(moving, integers.look_up(table, codes, at), floats.broadcast(np.float32(0.0)))
    change = floats.divide(widen(gradient, at, kind), floats.broadcast(loss_scale))
    change = floats.multiply(floats.multiply(floats.broadcast(gain), change), preconditioner)
    return floats.add(_signed(signs, moving, kept), change)


@helper
def _part_of_payload(
    gradient: _Bytes,
    codes: _Bytes,
    table: _Floats,
    payload: _Floats,
    at: int,
    end: int,
    lane: int,
    kind: int,
    signs: floats.Scalar,
    kept: np.float32,
    gain: np.float32,
    loss_scale: np.float32,
) -> None:
    """Elements at to end of the arrays, fewer than sixteen, of which the first belongs to the given lane."""
    size = ELEMENT_BYTES[kind]
    some_gradient = np.zeros(4 * LANES, dtype=np.uint8)
    some_codes = np.zeros(LANES, dtype=np.uint8)
    some_payload = np.zeros(LANES, dtype=np.float32)
    for i in range((end - at) * size):
        some_gradient[lane * size + i] = gradient[at * size + i]
    for i in range(end - at):
        some_codes[lane + i] = codes[at + i]
    value = _payload(some_gradient, some_codes, table, 0, kind, signs, kept, gain, loss_scale)
    floats.store(some_payload, 0, value)
    for i in range(end - at):
        payload[at + i] = some_payload[lane + i]


@kernel
def momentum_payload(
    packets: _Bytes,
    gradient: _Bytes,
    kind: int,
    codes: _Bytes,
    table: _Floats,
    payload: _Floats,
    first_block: int,
    last_block: int,
    first: int,
    block_size: int,
    row_blocks: int,
    row_bytes: int,
    beta1: np.float32,
    gain: np.float32,
    loss_scale: np.float32,
    streaming: bool,
) -> None:
    """Elements first, first + 1, ... as far as they lie in the given blocks; see `reference.momentum_payload`."""
    for block in range(first_block, last_block):
        scale_at, bits_at = locate(block, row_blocks, row_bytes, 1, block_size, 1)
        kept = floats.load_scalar(packets, scale_at) * beta1
        at, whole, behind, end = _ranges(block, block_size, first, codes.size)
        origin = block * block_size - first  # index of the block's start; whole groups are counted from there
        if at < whole:
            lane = (at - origin) % LANES
            signs = floats.load_bits(packets, bits_at + (at - origin - lane) // 8)
            _part_of_payload(gradient, codes, table, payload, at, whole, lane, kind, signs, kept, gain, loss_scale)
        for i in range(whole, behind, LANES):
            signs = floats.load_bits(packets, bits_at + (i - origin) // 8)
            value = _payload(gradient, codes, table, i, kind, signs, kept, gain, loss_scale)
            if streaming:
                floats.stream(payload, i, value)
            else:
                floats.store(payload, i, value)
        if behind < end:
            signs = floats.load_bits(packets, bits_at + (behind - origin) // 8)
            _part_of_payload(gradient, codes, table, payload, behind, end, 0, kind, signs, kept, gain, loss_scale)
    if streaming:
        floats.drain_streams()


@helper
def _step(
    weights: _Bytes,
    kind: int,
    codes: _Bytes,
    at: int,
    signs: floats.Scalar,
    step: np.float32,
    decay: np.float32,
    random: integers.Integers,
) -> None:
    moved = _signed(signs, _moving(codes, at), step)
    value = floats.multiply(widen(weights, at, kind), floats.broadcast(decay))
    round_and_store(weights, at, kind, floats.subtract(value, moved), random)


@helper
def _part_of_step(
    weights: _Bytes,
    kind: int,
    codes: _Bytes,
    at: int,
    end: int,
    lane: int,
    signs: floats.Scalar,
    step: np.float32,
    decay: np.float32,
    random: integers.Integers,
) -> None:
    """Elements at to end of the arrays, fewer than sixteen, of which the first belongs to the given lane."""
    size = ELEMENT_BYTES[kind]
    some_weights = np.zeros(4 * LANES, dtype=np.uint8)
    some_codes = np.zeros(LANES, dtype=np.uint8)
    for i in range((end - at) * size):
        some_weights[lane * size + i] = weights[at * size + i]
    for i in range(end - at):
        some_codes[lane + i] = codes[at + i]
    _step(some_weights, kind, some_codes, 0, signs, step, decay, random)
    for i in range((end - at) * size):
        weights[at * size + i] = some_weights[lane * size + i]


@kernel
def apply_signs(
    weights: _Bytes,
    kind: int,
    packets: _Bytes,
    codes: _Bytes,
    first_block: int,
    last_block: int,
    first: int,
    block_size: int,
    row_blocks: int,
    row_bytes: int,
    lr: np.float32,
    decay: np.float32,
    first_key: np.uint32,
    second_key: np.uint32,
) -> None:
    """Elements first, first + 1, ... as far as they lie in the given blocks; see `reference.apply_signs`."""
    for block in range(first_block, last_block):
        scale_at, bits_at = locate(block, row_blocks, row_bytes, 1, block_size, 1)
        step = floats.load_scalar(packets, scale_at) * lr
        at, whole, behind, end = _ranges(block, block_size, first, codes.size)
        origin = block * block_size - first  # index of the block's start; whole groups are counted from there
        if at < whole:
            lane = (at - origin) % LANES
            signs = floats.load_bits(packets, bits_at + (at - origin - lane) // 8)
            random = random_bits(first + at - lane, first_key, second_key)
            _part_of_step(weights, kind, codes, at, whole, lane, signs, step, decay, random)
        for i in range(whole, behind, LANES):
            signs = floats.load_bits(packets, bits_at + (i - origin) // 8)
            random = random_bits(first + i, first_key, second_key)
            _step(weights, kind, codes, i, signs, step, decay, random)
        if behind < end:
            signs = floats.load_bits(packets, bits_at + (behind - origin) // 8)
            random = random_bits(first + behind, first_key, second_key)
            _part_of_step(weights, kind, codes, behind, end, 0, signs, step, decay, random)
