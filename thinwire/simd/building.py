"""Turn a line of LLVM into a function that numba code can call: what the other modules here are made with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
_INT = ir.IntType(32)


def add_intrinsic(define: Callable[..., Any]) -> Any:
    """Decorator of numba, typed by what compiled code may do with the result: call it."""
    return intrinsic(define)


def vector_type(name: str, lanes: Any) -> Any:
    """A new numba type whose values are the LLVM vectors `lanes`."""

    class Vector(types.Type):
        def __init__(self) -> None:
            super().__init__(name=name)

    class VectorModel(models.PrimitiveModel):
        def __init__(self, manager: Any, numba_type: Any) -> None:
            super().__init__(manager, numba_type, lanes)  # type: ignore[no-untyped-call]

    register_model(Vector)(VectorModel)
    return Vector()


def operation(build: Callable[..., Any], result: Any, *arguments: Any) -> Any:
    """Intrinsic of one, two or three values, from `build(builder, *values)`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return build(builder, *values)

    def of_one(typing_context: Any, a: Any) -> Any:
        return result(*arguments), generate

    def of_two(typing_context: Any, a: Any, b: Any) -> Any:
        return result(*arguments), generate

    def of_three(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
        return result(*arguments), generate

    return add_intrinsic((of_one, of_two, of_three)[len(arguments) - 1])


def splat(builder: Any, value: Any, lanes: int = LANES) -> Any:
    """A vector of one value in every lane."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(single, single, ir.Constant(ir.VectorType(_INT, lanes), None))


def pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, memory: Any) -> Any:
    """Address of array[index] as a pointer to the LLVM type `memory`."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), memory.as_pointer())


def _unchanged(builder: Any, value: Any) -> Any:
    return value


def loader(memory: Any, result: Any, convert: Callable[[Any, Any], Any] = _unchanged) -> Any:
    """Intrinsic (array, index) -> result: read `memory` at array[index], whatever its alignment."""

    @add_intrinsic
    def load(typing_context: Any, array: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            address = pointer(context, builder, array, values[0], values[1], memory)
            return convert(builder, builder.load(address, align=1))

        return result(array, types.intp), generate

    return load


def storer(memory: Any, stored: Any, convert: Callable[[Any, Any], Any] = _unchanged, aligned: int = 1) -> Any:
    """Intrinsic (array, index, value): write `memory` at array[index].

    `aligned` above 1 promises that many bytes of alignment, and lets the store bypass the cache.
    """

    @add_intrinsic
    def store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            address = pointer(context, builder, array, values[0], values[1], memory)
            instruction = builder.store(convert(builder, values[2]), address, align=aligned)
            if aligned > 1:
                instruction.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT, 1)]))
            return context.get_dummy_value()

        return types.void(array, types.intp, stored), generate

    return store


def call(builder: Any, name: str, *values: Any) -> Any:
    """Call of the LLVM intrinsic `name`, which maps vectors of floats to another."""
    function_type = ir.FunctionType(values[0].type, [value.type for value in values])
    function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, function_type, f"{name}.v{LANES}f32"
    )
    return builder.call(function, values)


def select_by_bits(builder: Any, bits: Any, where_set: Any, where_clear: Any) -> Any:
    """Lane k of the first vector where bit k is set, of the second elsewhere."""
    return builder.select(builder.bitcast(bits, ir.VectorType(ir.IntType(1), LANES)), where_set, where_clear)


def fused_multiply_add(builder: Any, left: Any, right: Any, added: Any) -> Any:
    """left * right + added, rounded once: one instruction on processors of the last ten years."""
    return call(builder, "llvm.fma", left, right, added)
