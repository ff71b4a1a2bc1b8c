"""The sum of what lies in memory, word by word: a number that differs, but for chance, where a bit does."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.np.numpy_support import carray

from thinwire.simd.building import add_intrinsic
from thinwire.simd.compiling import kernel

__all__ = ["word_sum"]


@kernel
def word_sum(address: int, length: int) -> int:
    """Of the `length` bytes from `address` on: words of 64 bits, and bytes at the end, modulo 2⁶⁴.

    As fast as one thread reads memory. Whoever gives an address keeps its memory.
    """
    words = carray(_words_at(address), length // 8)
    total = 0
    for number in range(length // 8):
        total += words[number]
    rest = carray(_bytes_at(address + length // 8 * 8), length % 8)
    for number in range(length % 8):
        total += rest[number]
    return total


def _pointers_to(element: Any, bits: int) -> Any:
    """Intrinsic (address) -> a pointer to integers."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(bits).as_pointer())

    def pointer(typing_context: Any, address: Any) -> Any:
        return types.CPointer(element)(types.int64), generate  # type: ignore[no-untyped-call]

    return add_intrinsic(pointer)


_words_at = _pointers_to(types.int64, 64)
_bytes_at = _pointers_to(types.uint8, 8)
