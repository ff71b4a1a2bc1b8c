"""Floats of 16 bits in the loops of the CPU backend: made wide to calculate with, and rounded at random to be kept.

On bits, because numba has no such types and not every processor converts them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.compress.kernels import simd, simd_integers
from thinwire.compress.kernels.compiling import helper

__all__ = ["BFLOAT16", "ELEMENT_BYTES", "FORMATS", "NO_VALUES", "round_and_store", "round_to_nearest", "widen"]

_Bytes = NDArray[np.uint8]

NO_VALUES, _FLOAT32, BFLOAT16, _FLOAT16 = range(4)
FORMATS = {torch.float32: _FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: _FLOAT16}
ELEMENT_BYTES = (0, 4, 2, 2)

_HALF_SIGN = np.uint32(0x8000)
_HALF_NORMAL = np.uint32(0x0400)  # the smallest normal float16, 2^-14
_HALF_INFINITY = np.uint32(0x7C00)
_HALF_NAN = np.uint32(0x7E00)
_BRAIN_NAN = np.uint32(0x7FC0)
_SMALLEST_NORMAL = np.float32(2.0**-14)
_SMALLEST_NORMAL_BITS = np.uint32(113 << 23)
_SUBNORMAL_UNIT = np.float32(2.0**-24)
_REBIAS = np.uint32(112 << 23)  # between the exponents of float32 and of float16
_MANTISSA_DIFFERENCE = np.uint32(13)
_16 = np.uint32(16)


@helper
def widen(values: _Bytes, at: int, kind: int) -> simd.Vector:
    """Sixteen values from number `at` on, as float32; zeros for NO_VALUES."""
    if kind == _FLOAT32:
        return simd.load(values, 4 * at)
    if kind == BFLOAT16:
        return simd_integers.as_floats(simd_integers.shift_left(simd_integers.load_16_bits(values, 2 * at), _16))
    if kind == _FLOAT16:
        return _widen_float16(simd_integers.load_16_bits(values, 2 * at))
    return simd.broadcast(np.float32(0.0))


@helper
def _widen_float16(half: simd_integers.Integers) -> simd.Vector:
    sign_mask = simd_integers.broadcast(_HALF_SIGN)
    sign = simd_integers.shift_left(simd_integers.bit_and(half, sign_mask), _16)
    magnitude = simd_integers.bit_and(half, simd_integers.broadcast(np.uint32(0x7FFF)))
    rebias = simd_integers.broadcast(_REBIAS)
    wide = simd_integers.add(simd_integers.shift_left(magnitude, _MANTISSA_DIFFERENCE), rebias)
    finite = simd_integers.below(magnitude, simd_integers.broadcast(_HALF_INFINITY))
    wide = simd_integers.select(finite, wide, simd_integers.add(wide, rebias))
    subnormal = simd_integers.below(magnitude, simd_integers.broadcast(_HALF_NORMAL))
    counted = simd.multiply(simd_integers.to_floats(magnitude), simd.broadcast(_SUBNORMAL_UNIT))
    wide = simd_integers.select(subnormal, simd_integers.bits_of(counted), wide)
    return simd_integers.as_floats(simd_integers.bit_or(wide, sign))


@helper
def round_and_store(values: _Bytes, at: int, kind: int, value: simd.Vector, random: simd_integers.Integers) -> None:
    """Write sixteen float32 from number `at` on, rounded at random to what the format holds."""
    if kind == _FLOAT32:
        simd.store(values, 4 * at, value)
    elif kind == BFLOAT16:
        simd_integers.store_16_bits(values, 2 * at, _round_bfloat16(value, random))
    else:
        simd_integers.store_16_bits(values, 2 * at, _round_float16(value, random))


@helper
def _round_bfloat16(value: simd.Vector, random: simd_integers.Integers) -> simd_integers.Integers:
    rounded = simd_integers.shift_right(simd_integers.add(simd_integers.bits_of(value), random), _16)
    return simd_integers.select(simd.not_a_number(value), simd_integers.broadcast(_BRAIN_NAN), rounded)


@helper
def round_to_nearest(values: _Bytes, at: int, value: simd.Vector) -> None:
    """Write sixteen float32 from number `at` on, as the nearest bfloat16, ties to even."""
    bits = simd_integers.bits_of(value)
    last_kept = simd_integers.bit_and(simd_integers.shift_right(bits, _16), simd_integers.broadcast(np.uint32(1)))
    nudge = simd_integers.add(last_kept, simd_integers.broadcast(np.uint32(0x7FFF)))
    simd_integers.store_16_bits(values, 2 * at, _round_bfloat16(value, nudge))


@helper
def _round_float16(value: simd.Vector, random: simd_integers.Integers) -> simd_integers.Integers:
    magnitude = simd_integers.bits_of(simd.absolute(value))
    smallest_normal = simd_integers.broadcast(_SMALLEST_NORMAL_BITS)
    subnormal = simd_integers.below(magnitude, smallest_normal)
    # Next to 2^-14, subnormal float16 have the spacing that the normal ones there have: 13 bits more in float32.
    lifted = simd.add(simd.absolute(value), simd.broadcast(_SMALLEST_NORMAL))
    wide = simd_integers.select(subnormal, simd_integers.bits_of(lifted), magnitude)
    bias = simd_integers.select(subnormal, smallest_normal, simd_integers.broadcast(_REBIAS))
    wide = simd_integers.add(wide, simd_integers.shift_right(random, np.uint32(3)))
    rounded = simd_integers.shift_right(simd_integers.subtract(wide, bias), _MANTISSA_DIFFERENCE)
    infinity = simd_integers.broadcast(_HALF_INFINITY)
    rounded = simd_integers.select(simd_integers.below(rounded, infinity), rounded, infinity)
    rounded = simd_integers.select(simd.not_a_number(value), simd_integers.broadcast(_HALF_NAN), rounded)
    upper_half = simd_integers.shift_right(simd_integers.bits_of(value), _16)
    return simd_integers.bit_or(rounded, simd_integers.bit_and(upper_half, simd_integers.broadcast(_HALF_SIGN)))
