"""Floats of 8 bits, e4m3 without infinities, in the loops of the CPU backend: as torch.float8_e4m3fn rounds and reads
them. On bits, because numba has no such type."""

from __future__ import annotations

import numpy as np

from thinwire.simd import floats, integers
from thinwire.simd.compiling import inner

__all__ = ["rounded", "widened"]

_SIGN, _MAGNITUDE = np.uint32(0x80), np.uint32(0x7F)
_HIGH_SIGN, _HIGH_MAGNITUDE = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_TO_HIGH_SIGN = np.uint32(24)
_MANTISSA_DIFFERENCE = np.uint32(20)  # bits of mantissa that float32 has more
_BELOW_HALF, _LAST = np.uint32(0x7FFFF), np.uint32(1)  # of the last bit kept
_REBIAS = np.uint32(120 << 3)  # between the exponents of float32 and of e4m3
_SMALLEST_NORMAL, _NORMAL_CODE = np.float32(2.0**-6), np.uint32(8)
_SUBNORMAL_UNIT = np.float32(2.0**-9)
_ROUNDING = np.float32(2.0**14)  # its last bit is worth a subnormal unit
_SUBNORMAL_CODES = np.uint32(0xF)
_LARGEST, _NAN = np.uint32(0x7E), np.uint32(0x7FC00000)


@inner
def rounded(value: floats.Vector) -> integers.Integers:
    """Codes of the numbers next to `value`, in [-448, 448]; ties to even."""
    bits = integers.bits_of(value)
    magnitude_bits = integers.bit_and(bits, integers.broadcast(_HIGH_MAGNITUDE))
    magnitude = integers.as_floats(magnitude_bits)
    odd = integers.bit_and(integers.shift_right(magnitude_bits, _MANTISSA_DIFFERENCE), integers.broadcast(_LAST))
    up = integers.add(integers.add(magnitude_bits, integers.broadcast(_BELOW_HALF)), odd)
    normal = integers.subtract(integers.shift_right(up, _MANTISSA_DIFFERENCE), integers.broadcast(_REBIAS))
    lifted = integers.bits_of(floats.add(magnitude, floats.broadcast(_ROUNDING)))
    subnormal = integers.bit_and(lifted, integers.broadcast(_SUBNORMAL_CODES))
    is_subnormal = floats.below(magnitude, floats.broadcast(_SMALLEST_NORMAL))
    sign = integers.bit_and(integers.shift_right(bits, _TO_HIGH_SIGN), integers.broadcast(_SIGN))
    return integers.bit_or(integers.select(is_subnormal, subnormal, normal), sign)


@inner
def widened(code: integers.Integers) -> floats.Vector:
    """The numbers that codes stand for; NaN for the two that are none."""
    magnitude = integers.bit_and(code, integers.broadcast(_MAGNITUDE))
    normal = integers.shift_left(integers.add(magnitude, integers.broadcast(_REBIAS)), _MANTISSA_DIFFERENCE)
    subnormal = floats.multiply(integers.to_floats(magnitude), floats.broadcast(_SUBNORMAL_UNIT))
    is_subnormal = integers.below(magnitude, integers.broadcast(_NORMAL_CODE))
    bits = integers.select(is_subnormal, integers.bits_of(subnormal), normal)
    is_nan = integers.below(integers.broadcast(_LARGEST), magnitude)
    bits = integers.select(is_nan, integers.broadcast(_NAN), bits)
    sign = integers.bit_and(integers.shift_left(code, _TO_HIGH_SIGN), integers.broadcast(_HIGH_SIGN))
    return integers.as_floats(integers.bit_or(bits, sign))
