"""The hash of `noise` on sixteen elements at once, for the loops of the CPU backend."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from thinwire.compress.kernels.noise import MULTIPLIERS, SHIFTS
from thinwire.simd import integers
from thinwire.simd.building import LANES, operation, splat

__all__ = ["random_bits"]

_INT = ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)


def _random_bits(builder: Any, number: Any, first_key: Any, second_key: Any) -> Any:
    """`noise.random_bits`; two elements share 32 bits, so that half a vector serves sixteen."""
    pairs = ir.VectorType(_INT, LANES // 2)

    def constant(value: int) -> Any:
        return ir.Constant(pairs, [value] * (LANES // 2))

    def fold(bits: Any, shift: int) -> Any:
        return builder.xor(bits, builder.lshr(bits, constant(shift)))

    first_pair = builder.trunc(builder.lshr(number, ir.Constant(number.type, 1)), _INT)
    bits = builder.add(splat(builder, first_pair, LANES // 2), ir.Constant(pairs, list(range(LANES // 2))))
    bits = builder.xor(builder.mul(bits, constant(MULTIPLIERS[0])), splat(builder, first_key, LANES // 2))
    bits = builder.mul(fold(bits, SHIFTS[0]), constant(MULTIPLIERS[1]))
    bits = builder.xor(bits, splat(builder, second_key, LANES // 2))
    bits = builder.mul(fold(bits, SHIFTS[1]), constant(MULTIPLIERS[2]))
    return builder.zext(builder.bitcast(fold(bits, SHIFTS[2]), _SHORTS), _INTS)


# Of sixteen consecutive elements from an even number on, with the two keys of a seed.
random_bits = operation(_random_bits, integers.vector, types.int64, types.uint32, types.uint32)
