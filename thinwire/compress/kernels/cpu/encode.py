"""Loops of the CPU backend that encode: numba functions over a range of blocks, without the GIL.

A block is read from memory once and stays in the first-level cache for the passes that follow, so the speed
is that of the memory. Ranges, not numba's own threads: those abort when several Python threads, such as
in-process ranks, enter them at once."""

from __future__ import annotations

import math

import numpy as np

from thinwire.compress.kernels.cpu import small_floats
from thinwire.compress.kernels.cpu.blocks import (
    FP8,
    INT4,
    INT8,
    SIGN1,
    STAT2,
    STEP,
    Bytes,
    Floats,
    Layout,
    Place,
    Range,
    corrected_at,
    place_in_part,
    start_of,
    store_step,
)
from thinwire.compress.kernels.cpu.small_floats import BFLOAT16, NO_VALUES, store_nearest, widen
from thinwire.compress.packet_layout import SCALE_BYTES
from thinwire.simd import doubles, floats, integers, memory
from thinwire.simd.building import LANES
from thinwire.simd.compiling import helper, inner, kernel

_SPLIT = 0.98


@helper
def encode_in_two_magnitudes(
    payload: Floats, residual: Floats, packets: Bytes, start: int, stop: int, place: Place, correct: bool
) -> None:
    """A block of payload + residual, or of the payload alone, in which padding is 0; see `code_reference`."""
    square = _sum_of_squares(payload, residual, start, stop, correct) / np.float64(max(place.valid, 1))
    split = np.float32(math.sqrt(square) * _SPLIT)
    small, large = _pack(payload, packets, start, stop, place, split)
    both = small + large
    if not np.isfinite(both):
        small, large = both, both
    floats.store_scalar(packets, place.scale_at, small)
    floats.store_scalar(packets, place.scale_at + SCALE_BYTES, large)
    size = stop - start
    for i in range(0, size, LANES):
        decoded = magnitudes_at(packets, place.codes + i // 8, size // 8, small, large)
        floats.store(payload, start + i, floats.subtract(floats.load(payload, start + i), decoded))
    for i in range(place.valid, size):
        payload[start + i] = 0.0
        packets[place.codes + i // 8] &= ~(1 << i % 8)
        packets[place.codes + size // 8 + i // 8] &= ~(1 << i % 8)


@inner
def magnitudes_at(packets: Bytes, at: int, plane: int, small: np.float32, large: np.float32) -> floats.Vector:
    """Sixteen elements whose signs' bits lie at byte `at`, and those of their magnitudes `plane` bytes on."""
    is_large = floats.load_bits(packets, at + plane)
    positive = floats.select(is_large, floats.broadcast(large), floats.broadcast(small))
    negative = floats.select(is_large, floats.broadcast(-large), floats.broadcast(-small))
    return floats.select(floats.load_bits(packets, at), positive, negative)


@helper
def _sum_of_squares(payload: Floats, residual: Floats, start: int, stop: int, correct: bool) -> float:
    """Payload += residual if `correct`; return the sum of its squares, of every 64th element first as specified."""
    zero = doubles.zeros(floats.broadcast(np.float32(0.0)))
    sum0, sum1, sum2, sum3 = zero, zero, zero, zero
    for i in range(start, stop, STEP):
        value0 = corrected_at(payload, residual, i, correct)
        value1 = corrected_at(payload, residual, i + LANES, correct)
        value2 = corrected_at(payload, residual, i + 2 * LANES, correct)
        value3 = corrected_at(payload, residual, i + 3 * LANES, correct)
        if correct:
            store_step(payload.ctypes.data + 4 * i, value0, value1, value2, value3)
        sum0 = doubles.add_squares(sum0, value0)
        sum1 = doubles.add_squares(sum1, value1)
        sum2 = doubles.add_squares(sum2, value2)
        sum3 = doubles.add_squares(sum3, value3)
    return doubles.reduce_sum(doubles.add(doubles.add(sum0, sum2), doubles.add(sum1, sum3)))  # type: ignore[no-any-return]


@helper
def _pack(
    payload: Floats, packets: Bytes, start: int, stop: int, place: Place, split: np.float32
) -> tuple[np.float32, np.float32]:
    """Write the bits of signs and magnitudes; return the mean magnitudes below the split, and of the rest.

    Where the split is 0, so are both: then it does not matter that padding is counted.
    """
    zero, threshold = floats.broadcast(np.float32(0.0)), floats.broadcast(split)
    small0, small1, small2, small3 = zero, zero, zero, zero
    large0, large1, large2, large3 = zero, zero, zero, zero
    count, plane = 0, (stop - start) // 8
    for i in range(start, stop, STEP):
        at = place.codes + (i - start) // 8
        magnitude0, bits0 = _put_bits(payload, packets, i, at, plane, threshold)
        magnitude1, bits1 = _put_bits(payload, packets, i + LANES, at + 2, plane, threshold)
        magnitude2, bits2 = _put_bits(payload, packets, i + 2 * LANES, at + 4, plane, threshold)
        magnitude3, bits3 = _put_bits(payload, packets, i + 3 * LANES, at + 6, plane, threshold)
        count += floats.count_bits(bits0) + floats.count_bits(bits1)
        count += floats.count_bits(bits2) + floats.count_bits(bits3)
        small0 = floats.add(small0, floats.select(bits0, zero, magnitude0))
        small1 = floats.add(small1, floats.select(bits1, zero, magnitude1))
        small2 = floats.add(small2, floats.select(bits2, zero, magnitude2))
        small3 = floats.add(small3, floats.select(bits3, zero, magnitude3))
        large0 = floats.add(large0, floats.select(bits0, magnitude0, zero))
        large1 = floats.add(large1, floats.select(bits1, magnitude1, zero))
        large2 = floats.add(large2, floats.select(bits2, magnitude2, zero))
        large3 = floats.add(large3, floats.select(bits3, magnitude3, zero))
    small = floats.reduce_sum(floats.add(floats.add(small0, small2), floats.add(small1, small3)))
    large = floats.reduce_sum(floats.add(floats.add(large0, large2), floats.add(large1, large3)))
    return small / np.float32(max(place.valid - count, 1)), large / np.float32(max(count, 1))


@inner
def _put_bits(
    payload: Floats, packets: Bytes, i: int, at: int, plane: int, threshold: floats.Vector
) -> tuple[floats.Vector, int]:
    """Write the bits of sixteen elements; return their magnitudes, and which are at the split or above."""
    value = floats.load(payload, i)
    magnitude = floats.absolute(value)
    bits = floats.at_least(magnitude, threshold)
    floats.store_bits(packets, at, floats.nonnegative(value))
    floats.store_bits(packets, at + plane, bits)
    return magnitude, bits


Sums = tuple[floats.Vector, floats.Vector, floats.Vector, floats.Vector]
_TOP_LEVELS = (np.float32(0.0), np.float32(0.0), np.float32(7.0), np.float32(448.0), np.float32(127.0))  # by codec


@kernel
def encode(payload: Floats, residual: Floats, packets: Bytes, layout: Layout, blocks: Range) -> None:
    """Blocks of payload + residual, which is empty or as long; see `reference.encode`."""
    for block in range(blocks.first, blocks.last):
        start = start_of(layout, block)
        place = place_in_part(layout, block, start)
        encode_block(payload, residual, start, packets, layout.block_size, layout.form.codec, place)


@kernel
def encode_rounded(
    payload: Floats, residual: Bytes, new_residual: Bytes, packets: Bytes, layout: Layout, blocks: Range
) -> None:
    """The same with residuals in bf16; see `reference.encode`."""
    nothing = np.empty(0, dtype=np.float32)
    corrected = np.empty(layout.block_size, dtype=np.float32)
    kind = BFLOAT16 if residual.size else NO_VALUES
    for block in range(blocks.first, blocks.last):
        start = start_of(layout, block)
        add_and_store(payload[start : start + layout.block_size], residual, kind, start, corrected)
        place = place_in_part(layout, block, start)
        encode_block(corrected, nothing, 0, packets, layout.block_size, layout.form.codec, place)
        store_rounded_block(corrected, new_residual, BFLOAT16, start)


@helper
def add_and_store(payload: Floats, residual: Bytes, kind: int, start: int, corrected: Floats) -> None:
    """Write a block of payload, plus the residual from element `start` on, to `corrected`, which may be `payload`."""
    for i in range(0, corrected.size, LANES):
        floats.store(corrected, i, floats.add(floats.load(payload, i), widen(residual, start + i, kind)))


@helper
def store_rounded_block(lost: Floats, new_residual: Bytes, kind: int, start: int) -> None:
    """Write a block to elements `start` on of a residual of any width, to the nearest."""
    for i in range(0, lost.size, LANES):
        store_nearest(new_residual, start + i, kind, floats.load(lost, i))


@inner
def encode_block(
    payload: Floats, residual: Floats, start: int, packets: Bytes, block_size: int, codec: int, place: Place
) -> None:
    """Encode payload + residual of one block, from element `start` on, and leave what the codec lost in `payload`."""
    stop = start + block_size
    correct = _needs_residual(payload, residual, start, stop, place.valid)
    if codec == SIGN1:
        encode_signs(payload, residual, packets, start, stop, place, correct)
    elif codec == STAT2:
        encode_in_two_magnitudes(payload, residual, packets, start, stop, place, correct)
    else:
        _encode_levels(payload, residual, packets, start, stop, place, correct, codec)


@inner
def _needs_residual(payload: Floats, residual: Floats, start: int, stop: int, valid: int) -> bool:
    """Whether a residual is yet to be added; a block that ends in padding gets it here, and zeros behind."""
    if start + valid == stop:
        return residual.size > 0
    if residual.size:
        for i in range(start, start + valid):
            payload[i] += residual[i]
    payload[start + valid : stop] = 0.0
    return False


@helper
def encode_signs(
    payload: Floats, residual: Floats, packets: Bytes, start: int, stop: int, place: Place, correct: bool
) -> None:
    """A block of payload, and of the residual if `correct`, in which padding is 0, as `encode_block` does."""
    total = _pack_signs(payload, residual, packets, start, stop, place.codes, correct)
    lose_signs(payload.ctypes.data + 4 * start, packets, stop - start, place, total)
    for i in range(place.valid, stop - start):
        payload[start + i] = 0.0
        packets[place.codes + i // 8] &= ~(1 << i % 8)


@helper
def lose_signs(payload: int, packets: Bytes, size: int, place: Place, total: floats.Scalar) -> None:
    """Write the scale of a block whose signs are packed and whose magnitudes sum to `total`, and take what the packet
    says off the payload at an address."""
    scale = total / np.float32(max(place.valid, 1))
    floats.store_scalar(packets, place.scale_at, scale)
    plus, minus = floats.broadcast(scale), floats.broadcast(-scale)
    for i in range(0, size, LANES):
        decoded = floats.select(floats.load_bits(packets, place.codes + i // 8), plus, minus)
        memory.store_floats(payload + 4 * i, floats.subtract(memory.load_floats(payload + 4 * i), decoded))


@helper
def _pack_signs(
    payload: Floats, residual: Floats, packets: Bytes, start: int, stop: int, codes: int, correct: bool
) -> floats.Scalar:
    """Payload += residual if `correct`; write its sign bits at byte `codes`; return the sum of magnitudes."""
    sums = no_sums()
    for i in range(start, stop, STEP):
        value0 = corrected_at(payload, residual, i, correct)
        value1 = corrected_at(payload, residual, i + LANES, correct)
        value2 = corrected_at(payload, residual, i + 2 * LANES, correct)
        value3 = corrected_at(payload, residual, i + 3 * LANES, correct)
        if correct:
            store_step(payload.ctypes.data + 4 * i, value0, value1, value2, value3)
        sums = pack_step(packets, codes + (i - start) // 8, sums, value0, value1, value2, value3)
    return total_of(sums)


@inner
def no_sums() -> Sums:
    """Where four sums begin."""
    zero = floats.broadcast(np.float32(0.0))
    return zero, zero, zero, zero


@inner
def pack_step(
    packets: Bytes,
    codes: int,
    sums: Sums,
    value0: floats.Vector,
    value1: floats.Vector,
    value2: floats.Vector,
    value3: floats.Vector,
) -> Sums:
    """Write the sign bits of the next `STEP` elements at byte `codes`, and add up their magnitudes."""
    floats.store_bits(packets, codes, floats.nonnegative(value0))
    floats.store_bits(packets, codes + 2, floats.nonnegative(value1))
    floats.store_bits(packets, codes + 4, floats.nonnegative(value2))
    floats.store_bits(packets, codes + 6, floats.nonnegative(value3))
    return (
        floats.add(sums[0], floats.absolute(value0)),
        floats.add(sums[1], floats.absolute(value1)),
        floats.add(sums[2], floats.absolute(value2)),
        floats.add(sums[3], floats.absolute(value3)),
    )


@inner
def total_of(sums: Sums) -> floats.Scalar:
    """The sum over all lanes, in an order that no processor changes."""
    return floats.reduce_sum(floats.add(floats.add(sums[0], sums[1]), floats.add(sums[2], sums[3])))


@inner
def _encode_levels(
    payload: Floats, residual: Floats, packets: Bytes, start: int, stop: int, place: Place, correct: bool, codec: int
) -> None:
    scale = _largest(payload, residual, start, stop, correct) / _TOP_LEVELS[codec]
    floats.store_scalar(packets, place.scale_at, scale)
    if not (scale > 0.0 and np.isfinite(scale)):
        packets[place.codes : place.codes + (stop - start) // (2 if codec == INT4 else 1)] = 0
        for i in range(start, start + place.valid):
            payload[i] -= np.float32(0.0) * scale
    elif codec == INT8:
        _quantize(payload, packets, start, stop, place.codes, scale, INT8)
    elif codec == INT4:
        _quantize(payload, packets, start, stop, place.codes, scale, INT4)
    else:
        _quantize(payload, packets, start, stop, place.codes, scale, FP8)


@inner
def _largest(payload: Floats, residual: Floats, start: int, stop: int, correct: bool) -> floats.Scalar:
    """Payload += residual if `correct`; return its largest magnitude, NaN if it holds one."""
    largest = floats.broadcast(np.float32(0.0))
    for at in range(start, stop, LANES):
        value = corrected_at(payload, residual, at, correct)
        if correct:
            floats.store(payload, at, value)
        largest = floats.maximum(largest, floats.absolute(value))
    return floats.reduce_max(largest)


@inner
def _quantize(
    payload: Floats, packets: Bytes, start: int, stop: int, codes: int, scale: np.float32, codec: int
) -> None:
    """Write the codes of a block at byte `codes`, and leave what they lose in `payload`."""
    divisor = floats.broadcast(scale)
    top = floats.broadcast(_TOP_LEVELS[codec])
    bottom = floats.broadcast(-_TOP_LEVELS[codec])
    for i in range(start, stop, LANES):
        value = floats.load(payload, i)
        level = floats.divide(value, divisor)
        if codec == FP8:
            code = small_floats.rounded(floats.clamp(level, bottom, top))
            integers.store_8_bits(packets, codes + i - start, code)
            level = small_floats.widened(code)
        else:
            level = floats.clamp(floats.nearest(level), bottom, top)
            if codec == INT4:
                floats.store_int4(packets, codes + (i - start) // 2, level)
            else:
                floats.store_int8(packets, codes + i - start, level)
        floats.store(payload, i, floats.subtract(value, floats.multiply(level, divisor)))
