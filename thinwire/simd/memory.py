"""Memory that a numba function is given as an address: where many tensors lie, in one array of integers."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types

from thinwire.simd.building import add_intrinsic
from thinwire.simd.compiling import helper

__all__ = ["bytes_at"]


@add_intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@helper
def bytes_at(address: int, size: int) -> Any:
    """An array of `size` bytes over the memory at `address`, which somebody else must keep; may be unaligned."""
    return carray(_pointer(address), size, np.uint8)
