"""Sixteen numbers at an address: where many tensors lie is given to a numba function as one array of integers. And the
sum of what lies there, which differs, but for chance, where a bit does.

Whoever gives an address keeps its memory. Arrays would be counted as references, which costs inner loops more than what
they do; and the last elements of a tensor, fewer than sixteen, can be taken by themselves.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from thinwire.simd import floats, integers
from thinwire.simd.building import LANES, add_intrinsic, splat

_SHORT, _INT = ir.IntType(16), ir.IntType(32)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(_INT, LANES)
_SHORTS = ir.VectorType(_SHORT, LANES)


def _pointer(builder: Any, address: Any, memory: Any) -> Any:
    return builder.inttoptr(address, memory.as_pointer())


def _mask(builder: Any, count: Any) -> Any:
    """The first `count` lanes."""
    return builder.icmp_signed("<", ir.Constant(_INTS, list(range(LANES))), splat(builder, builder.trunc(count, _INT)))


def _masked(builder: Any, operation: str, memory: Any, result: Any, *values: Any) -> Any:
    name = f"llvm.masked.{operation}.v{LANES}{'f32' if memory is _FLOATS else 'i16'}.p0"
    function_type = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), values)  # type: ignore[no-untyped-call]


def _loader(memory: Any, result: Any, some: bool) -> Any:
    """Intrinsic (address) -> sixteen values, or (address, count) -> the first `count`, and zeros."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = _pointer(builder, values[0], memory)
        if some:
            aligned, zeros = ir.Constant(_INT, 1), ir.Constant(memory, None)
            loaded = _masked(builder, "load", memory, memory, pointer, aligned, _mask(builder, values[1]), zeros)
        else:
            loaded = builder.load(pointer, align=1)
        return loaded if memory is _FLOATS else builder.zext(loaded, _INTS)

    def load_some(typing_context: Any, address: Any, count: Any) -> Any:
        return result(types.int64, types.int64), generate

    def load(typing_context: Any, address: Any) -> Any:
        return result(types.int64), generate

    return add_intrinsic(load_some if some else load)


def _storer(memory: Any, stored: Any, some: bool) -> Any:
    """Intrinsic (address, values) that writes sixteen, or (address, values, count) that writes the first `count`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = _pointer(builder, values[0], memory)
        value = values[1] if memory is _FLOATS else builder.trunc(values[1], _SHORTS)
        if some:
            aligned = ir.Constant(_INT, 1)
            _masked(builder, "store", memory, ir.VoidType(), value, pointer, aligned, _mask(builder, values[2]))
        else:
            builder.store(value, pointer, align=1)
        return context.get_dummy_value()

    def store_some(typing_context: Any, address: Any, value: Any, count: Any) -> Any:
        return types.void(types.int64, stored, types.int64), generate

    def store(typing_context: Any, address: Any, value: Any) -> Any:
        return types.void(types.int64, stored), generate

    return add_intrinsic(store_some if some else store)


load_floats = _loader(_FLOATS, floats.vector, some=False)
load_some_floats = _loader(_FLOATS, floats.vector, some=True)
load_some_shorts = _loader(_SHORTS, integers.vector, some=True)
store_floats = _storer(_FLOATS, floats.vector, some=False)
store_some_floats = _storer(_FLOATS, floats.vector, some=True)
store_shorts = _storer(_SHORTS, integers.vector, some=False)
store_some_shorts = _storer(_SHORTS, integers.vector, some=True)
