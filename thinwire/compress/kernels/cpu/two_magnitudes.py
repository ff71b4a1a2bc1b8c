"""The part of the CPU backend's loops that knows stat2: signs and one of two magnitudes."""

from __future__ import annotations

import math

import numpy as np

from thinwire.compress.kernels.cpu.blocks import Bytes, Floats, Place
from thinwire.compress.kernels.cpu.steps import STEP, corrected_at, store_step
from thinwire.compress.packet_layout import SCALE_BYTES
from thinwire.simd import doubles, floats
from thinwire.simd.compiling import helper, inner
from thinwire.simd.floats import LANES

__all__ = ["encode_in_two_magnitudes", "magnitudes_at"]

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
