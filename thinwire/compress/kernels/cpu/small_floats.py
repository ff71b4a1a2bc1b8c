"""Floats of 16 and of 8 bits in the loops of the CPU backend: made wide to calculate with, and rounded to be kept, to
the nearest or at random. e4m3 is as torch.float8_e4m3fn rounds and reads it, without infinities.

On bits, because numba has no such types and not every processor converts them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types

from thinwire.compress.kernels.cpu.blocks import Bytes, Floats, Range
from thinwire.simd import floats, integers, memory
from thinwire.simd.building import LANES, operation, splat
from thinwire.simd.compiling import helper, inner, kernel

NO_VALUES, _FLOAT32, BFLOAT16, _FLOAT16 = range(4)
FORMATS = {torch.float32: _FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: _FLOAT16}
ELEMENT_BYTES = (0, 4, 2, 2)


class Values(NamedTuple):
    """Floats of any width, in memory as one of the formats above."""

    memory: Bytes
    kind: int


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
def some_of(memory: Bytes, first: int, low: int, high: int, size: int) -> Bytes:
    """Room for sixteen elements of `size` bytes: numbers low to high of those from `first` on, zeros elsewhere."""
    some = np.zeros(4 * LANES, dtype=np.uint8)
    some[low * size : high * size] = memory[(first + low) * size : (first + high) * size]
    return some


@helper
def widen(values: Bytes, at: int, kind: int) -> floats.Vector:
    """Sixteen values from number `at` on, as float32; zeros for NO_VALUES."""
    if kind == _FLOAT32:
        return floats.load(values, 4 * at)
    if kind == BFLOAT16:
        return integers.as_floats(integers.shift_left(integers.load_16_bits(values, 2 * at), _16))
    if kind == _FLOAT16:
        return _widen_float16(integers.load_16_bits(values, 2 * at))
    return floats.broadcast(np.float32(0.0))


@inner
def widen_at(address: int, kind: int, count: int) -> floats.Vector:
    """The first `count` of sixteen values that lie at an address, as float32, and zeros; zeros for NO_VALUES."""
    if kind == _FLOAT32:
        value = memory.load_some_floats(address, count)
    elif kind == BFLOAT16:
        value = integers.as_floats(integers.shift_left(memory.load_some_shorts(address, count), _16))
    elif kind == _FLOAT16:
        value = _widen_float16(memory.load_some_shorts(address, count))
    else:
        value = floats.broadcast(np.float32(0.0))
    return value


@helper
def _widen_float16(half: integers.Integers) -> floats.Vector:
    sign_mask = integers.broadcast(_HALF_SIGN)
    sign = integers.shift_left(integers.bit_and(half, sign_mask), _16)
    magnitude = integers.bit_and(half, integers.broadcast(np.uint32(0x7FFF)))
    rebias = integers.broadcast(_REBIAS)
    wide = integers.add(integers.shift_left(magnitude, _MANTISSA_DIFFERENCE), rebias)
    finite = integers.below(magnitude, integers.broadcast(_HALF_INFINITY))
    wide = integers.select(finite, wide, integers.add(wide, rebias))
    subnormal = integers.below(magnitude, integers.broadcast(_HALF_NORMAL))
    counted = floats.multiply(integers.to_floats(magnitude), floats.broadcast(_SUBNORMAL_UNIT))
    wide = integers.select(subnormal, integers.bits_of(counted), wide)
    return integers.as_floats(integers.bit_or(wide, sign))


@helper
def round_and_store(values: Bytes, at: int, kind: int, value: floats.Vector, random: integers.Integers) -> None:
    """Write sixteen float32 from number `at` on, rounded at random to what the format holds."""
    if kind == _FLOAT32:
        floats.store(values, 4 * at, value)
    elif kind == BFLOAT16:
        integers.store_16_bits(values, 2 * at, _round_bfloat16(value, random))
    else:
        integers.store_16_bits(values, 2 * at, _round_float16(value, random))


@helper
def _round_bfloat16(value: floats.Vector, random: integers.Integers) -> integers.Integers:
    rounded = integers.shift_right(integers.add(integers.bits_of(value), random), _16)
    return integers.select(floats.not_a_number(value), integers.broadcast(_BRAIN_NAN), rounded)


@helper
def store_nearest(values: Bytes, at: int, kind: int, value: floats.Vector) -> None:
    """Write sixteen float32 from number `at` on, to the nearest that the format holds, ties to even."""
    if kind == _FLOAT32:
        floats.store(values, 4 * at, value)
    else:
        integers.store_16_bits(values, 2 * at, nearest_bits(value, kind))


@inner
def nearest_bits(value: floats.Vector, kind: int) -> integers.Integers:
    """Sixteen float32 as the nearest bfloat16 or float16, ties to even."""
    brain = kind == BFLOAT16
    return _round_bfloat16(value, _nudge(integers.bits_of(value), _16)) if brain else _nearest_float16(value)


@helper
def _nudge(bits: integers.Integers, dropped: np.uint32) -> integers.Integers:
    """What rounds to the nearest, ties to even, once it is added and the last bits are `dropped`."""
    last_kept = integers.bit_and(integers.shift_right(bits, dropped), integers.broadcast(np.uint32(1)))
    return integers.add(last_kept, integers.broadcast((np.uint32(1) << (dropped - np.uint32(1))) - np.uint32(1)))


@helper
def _nearest_float16(value: floats.Vector) -> integers.Integers:
    magnitude = integers.bits_of(floats.absolute(value))
    # Next to 0.5 float32 are as far apart as subnormal float16: the sum is rounded once, to what float16 hold.
    half = floats.broadcast(np.float32(0.5))
    counted = integers.subtract(integers.bits_of(floats.add(floats.absolute(value), half)), integers.bits_of(half))
    wide = integers.subtract(
        integers.add(magnitude, _nudge(magnitude, _MANTISSA_DIFFERENCE)), integers.broadcast(_REBIAS)
    )
    subnormal = integers.below(magnitude, integers.broadcast(_SMALLEST_NORMAL_BITS))
    rounded = integers.select(subnormal, counted, integers.shift_right(wide, _MANTISSA_DIFFERENCE))
    return _with_sign(rounded, value)


@helper
def _round_float16(value: floats.Vector, random: integers.Integers) -> integers.Integers:
    magnitude = integers.bits_of(floats.absolute(value))
    smallest_normal = integers.broadcast(_SMALLEST_NORMAL_BITS)
    subnormal = integers.below(magnitude, smallest_normal)
    # Next to 2^-14, subnormal float16 have the spacing that the normal ones there have: 13 bits more in float32.
    lifted = floats.add(floats.absolute(value), floats.broadcast(_SMALLEST_NORMAL))
    wide = integers.select(subnormal, integers.bits_of(lifted), magnitude)
    bias = integers.select(subnormal, smallest_normal, integers.broadcast(_REBIAS))
    wide = integers.add(wide, integers.shift_right(random, np.uint32(3)))
    rounded = integers.shift_right(integers.subtract(wide, bias), _MANTISSA_DIFFERENCE)
    return _with_sign(rounded, value)


@helper
def _with_sign(rounded: integers.Integers, value: floats.Vector) -> integers.Integers:
    """Float16 of these magnitudes, infinite beyond the largest, with the signs of `value`, and NaN where that is."""
    infinity = integers.broadcast(_HALF_INFINITY)
    rounded = integers.select(integers.below(rounded, infinity), rounded, infinity)
    rounded = integers.select(floats.not_a_number(value), integers.broadcast(_HALF_NAN), rounded)
    upper_half = integers.shift_right(integers.bits_of(value), _16)
    return integers.bit_or(rounded, integers.bit_and(upper_half, integers.broadcast(_HALF_SIGN)))


_FP8_SIGN, _FP8_MAGNITUDE = np.uint32(0x80), np.uint32(0x7F)
_FP8_HIGH_SIGN, _FP8_HIGH_MAGNITUDE = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_FP8_TO_HIGH_SIGN = np.uint32(24)
_FP8_MANTISSA_DIFFERENCE = np.uint32(20)  # bits of mantissa that float32 has more
_FP8_BELOW_HALF, _FP8_LAST = np.uint32(0x7FFFF), np.uint32(1)  # of the last bit kept
_FP8_REBIAS = np.uint32(120 << 3)  # between the exponents of float32 and of e4m3
_FP8_SMALLEST_NORMAL, _FP8_NORMAL_CODE = np.float32(2.0**-6), np.uint32(8)
_FP8_SUBNORMAL_UNIT = np.float32(2.0**-9)
_FP8_ROUNDING = np.float32(2.0**14)  # its last bit is worth a subnormal unit
_FP8_SUBNORMAL_CODES = np.uint32(0xF)
_FP8_LARGEST, _FP8_NAN = np.uint32(0x7E), np.uint32(0x7FC00000)


@inner
def rounded(value: floats.Vector) -> integers.Integers:
    """Codes of the numbers next to `value`, in [-448, 448]; ties to even."""
    bits = integers.bits_of(value)
    magnitude_bits = integers.bit_and(bits, integers.broadcast(_FP8_HIGH_MAGNITUDE))
    magnitude = integers.as_floats(magnitude_bits)
    odd = integers.bit_and(
        integers.shift_right(magnitude_bits, _FP8_MANTISSA_DIFFERENCE), integers.broadcast(_FP8_LAST)
    )
    up = integers.add(integers.add(magnitude_bits, integers.broadcast(_FP8_BELOW_HALF)), odd)
    normal = integers.subtract(integers.shift_right(up, _FP8_MANTISSA_DIFFERENCE), integers.broadcast(_FP8_REBIAS))
    lifted = integers.bits_of(floats.add(magnitude, floats.broadcast(_FP8_ROUNDING)))
    subnormal = integers.bit_and(lifted, integers.broadcast(_FP8_SUBNORMAL_CODES))
    is_subnormal = floats.below(magnitude, floats.broadcast(_FP8_SMALLEST_NORMAL))
    sign = integers.bit_and(integers.shift_right(bits, _FP8_TO_HIGH_SIGN), integers.broadcast(_FP8_SIGN))
    return integers.bit_or(integers.select(is_subnormal, subnormal, normal), sign)


@inner
def widened(code: integers.Integers) -> floats.Vector:
    """The numbers that codes stand for; NaN for the two that are none."""
    magnitude = integers.bit_and(code, integers.broadcast(_FP8_MAGNITUDE))
    normal = integers.shift_left(integers.add(magnitude, integers.broadcast(_FP8_REBIAS)), _FP8_MANTISSA_DIFFERENCE)
    subnormal = floats.multiply(integers.to_floats(magnitude), floats.broadcast(_FP8_SUBNORMAL_UNIT))
    is_subnormal = integers.below(magnitude, integers.broadcast(_FP8_NORMAL_CODE))
    bits = integers.select(is_subnormal, integers.bits_of(subnormal), normal)
    is_nan = integers.below(integers.broadcast(_FP8_LARGEST), magnitude)
    bits = integers.select(is_nan, integers.broadcast(_FP8_NAN), bits)
    sign = integers.bit_and(integers.shift_left(code, _FP8_TO_HIGH_SIGN), integers.broadcast(_FP8_HIGH_SIGN))
    return integers.as_floats(integers.bit_or(bits, sign))


_INT = ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
# Of `reference.random_bits`; not imported, as machine code is compiled anew after a change to what it imports.
_MULTIPLIERS, _SHIFTS = (0x1E3779B9, 0x21F0AAAD, 0x735A2D97), (16, 15, 15)


def _random_bits(builder: Any, number: Any, first_key: Any, second_key: Any) -> Any:
    """`reference.random_bits`; two elements share 32 bits, so that half a vector serves sixteen."""
    pairs = ir.VectorType(_INT, LANES // 2)

    def constant(value: int) -> Any:
        return ir.Constant(pairs, [value] * (LANES // 2))

    def fold(bits: Any, shift: int) -> Any:
        return builder.xor(bits, builder.lshr(bits, constant(shift)))

    first_pair = builder.trunc(builder.lshr(number, ir.Constant(number.type, 1)), _INT)
    bits = builder.add(splat(builder, first_pair, LANES // 2), ir.Constant(pairs, list(range(LANES // 2))))
    bits = builder.xor(builder.mul(bits, constant(_MULTIPLIERS[0])), splat(builder, first_key, LANES // 2))
    bits = builder.mul(fold(bits, _SHIFTS[0]), constant(_MULTIPLIERS[1]))
    bits = builder.xor(bits, splat(builder, second_key, LANES // 2))
    bits = builder.mul(fold(bits, _SHIFTS[1]), constant(_MULTIPLIERS[2]))
    return builder.zext(builder.bitcast(fold(bits, _SHIFTS[2]), _SHORTS), _INTS)


# Of sixteen consecutive elements from an even number on, with the two keys of a seed.
random_bits = operation(_random_bits, integers.vector, types.int64, types.uint32, types.uint32)


@kernel
def store_rounded(
    weights: Values, values: Floats, first_key: np.uint32, second_key: np.uint32, elements: Range
) -> None:
    """Elements from `first`, a multiple of sixteen, up to `last`; see `reference.store`."""
    memory, kind = weights
    behind = elements.last // LANES * LANES
    for i in range(elements.first, behind, LANES):
        round_and_store(memory, i, kind, floats.load(values, i), random_bits(i, first_key, second_key))
    left = elements.last - behind
    if left:
        size = ELEMENT_BYTES[kind]
        some_values = np.zeros(LANES, dtype=np.float32)
        some_weights = np.zeros(4 * LANES, dtype=np.uint8)
        some_values[:left] = values[behind : elements.last]
        random = random_bits(behind, first_key, second_key)
        round_and_store(some_weights, 0, kind, floats.load(some_values, 0), random)
        memory[behind * size : elements.last * size] = some_weights[: left * size]
