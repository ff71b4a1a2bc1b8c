"""The inner loops of the CPU backend: numba functions over a range of blocks, without the GIL.

A block is read from memory once and stays in the first-level cache for the passes that follow, so the speed
is that of the memory. Ranges, not numba's own threads: those abort when several Python threads, such as
in-process ranks, enter them at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import binding
from numpy.typing import NDArray

from thinwire.compress.kernels import layout, simd
from thinwire.compress.kernels.layout import HEADER_BYTES, SCALE_BYTES
from thinwire.compress.kernels.simd import LANES

__all__ = ["DECODE", "ENCODE"]

_Floats = NDArray[np.float32]
_Bytes = NDArray[np.uint8]
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_STEP = 4 * LANES  # four sums side by side hide the latency of an addition; every block is a multiple


def _cache_key() -> str:
    """Digest of the processor and of the sources that the machine code depends on.

    numba names its cache files after the function and checks only the file that defines it. With this key in the
    name, a home folder shared by unlike machines, or an upgrade while other processes start, cannot hand out
    foreign or outdated machine code.
    """
    sources = [Path(path).read_bytes() for path in (__file__, simd.__file__, layout.__file__)]
    processor = binding.get_host_cpu_name() + binding.get_host_cpu_features().flatten()
    return hashlib.sha256(b"".join(sources) + processor.encode()).hexdigest()[:16]


_CACHE_KEY = _cache_key()


def _helper(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Compile a function that only kernels call."""
    return cast("Callable[_Parameters, _Result]", numba.njit(nogil=True)(function))


def _kernel(function: Callable[_Parameters, None]) -> Callable[_Parameters, None]:
    """Compile a kernel at its first call; keep the machine code on disk, where there is a folder to write to."""
    function.__qualname__ = f"{function.__name__}_{_CACHE_KEY}"
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no such folder
        compiled = numba.njit(nogil=True)(function)
    return cast("Callable[_Parameters, None]", compiled)


@_helper
def _valid(block: int, numel: int, block_size: int) -> int:
    """How many elements of a block are not padding."""
    return min(max(numel - block * block_size, 0), block_size)


@_helper
def _locate(block: int, row_blocks: int, row_bytes: int, rows: int, block_size: int, code_bits: int) -> tuple[int, int]:
    """Bytes at which scale and codes of a block begin, in the first of the `rows` packets that are about it."""
    row_at = block // row_blocks * rows * row_bytes
    column = block % row_blocks
    scale_at = row_at + HEADER_BYTES + SCALE_BYTES * column
    codes = row_at + HEADER_BYTES + SCALE_BYTES * row_blocks + column * block_size * code_bits // 8
    return scale_at, codes


@_helper
def _needs_residual(payload: _Floats, residual: _Floats, start: int, valid: int, block_size: int) -> bool:
    """Whether a residual is yet to be added; a block that ends in padding gets it here, and zeros behind."""
    if valid == block_size:
        return residual.size > 0
    if residual.size:
        for i in range(start, start + valid):
            payload[i] += residual[i]
    payload[start + valid : start + block_size] = 0.0
    return False


@_helper
def _corrected(payload: _Floats, residual: _Floats, at: int, correct: bool) -> simd.Vector:
    value = simd.load(payload, at)
    return simd.add(value, simd.load(residual, at)) if correct else value


@_helper
def _pack_signs(
    payload: _Floats, residual: _Floats, packets: _Bytes, start: int, codes: int, block_size: int, correct: bool
) -> simd.Scalar:
    """Payload += residual if `correct`; write its sign bits at byte `codes`; return the sum of magnitudes."""
    zero = simd.broadcast(np.float32(0.0))
    sum0, sum1, sum2, sum3 = zero, zero, zero, zero
    for i in range(0, block_size, _STEP):
        at = start + i
        value0 = _corrected(payload, residual, at, correct)
        value1 = _corrected(payload, residual, at + LANES, correct)
        value2 = _corrected(payload, residual, at + 2 * LANES, correct)
        value3 = _corrected(payload, residual, at + 3 * LANES, correct)
        if correct:
            simd.store(payload, at, value0)
            simd.store(payload, at + LANES, value1)
            simd.store(payload, at + 2 * LANES, value2)
            simd.store(payload, at + 3 * LANES, value3)
        sum0 = simd.add(sum0, simd.absolute(value0))
        sum1 = simd.add(sum1, simd.absolute(value1))
        sum2 = simd.add(sum2, simd.absolute(value2))
        sum3 = simd.add(sum3, simd.absolute(value3))
        bits = codes + i // 8
        simd.store_bits(packets, bits, simd.nonnegative(value0))
        simd.store_bits(packets, bits + 2, simd.nonnegative(value1))
        simd.store_bits(packets, bits + 4, simd.nonnegative(value2))
        simd.store_bits(packets, bits + 6, simd.nonnegative(value3))
    return simd.reduce_sum(simd.add(simd.add(sum0, sum1), simd.add(sum2, sum3)))


@_helper
def _largest(payload: _Floats, residual: _Floats, start: int, block_size: int, correct: bool) -> simd.Scalar:
    """Payload += residual if `correct`; return its largest magnitude, NaN if it holds one."""
    largest = simd.broadcast(np.float32(0.0))
    for at in range(start, start + block_size, LANES):
        value = _corrected(payload, residual, at, correct)
        if correct:
            simd.store(payload, at, value)
        largest = simd.maximum(largest, simd.absolute(value))
    return simd.reduce_max(largest)


@_helper
def _quantize(payload: _Floats, packets: _Bytes, start: int, codes: int, scale: np.float32, block_size: int) -> None:
    """Write the codes of a block at byte `codes`, and leave what they lose in `payload`."""
    divisor = simd.broadcast(scale)
    top = simd.broadcast(np.float32(127.0))
    bottom = simd.broadcast(np.float32(-127.0))
    for i in range(0, block_size, LANES):
        value = simd.load(payload, start + i)
        level = simd.clamp(simd.nearest(simd.divide(value, divisor)), bottom, top)
        simd.store_int8(packets, codes + i, level)
        simd.store(payload, start + i, simd.subtract(value, simd.multiply(level, divisor)))


@_kernel
def _encode_sign1(
    payload: _Floats,
    residual: _Floats,
    packets: _Bytes,
    first: int,
    last: int,
    numel: int,
    block_size: int,
    row_blocks: int,
    row_bytes: int,
) -> None:
    for block in range(first, last):
        start = block * block_size
        valid = _valid(block, numel, block_size)
        scale_at, codes = _locate(block, row_blocks, row_bytes, 1, block_size, 1)
        correct = _needs_residual(payload, residual, start, valid, block_size)
        total = _pack_signs(payload, residual, packets, start, codes, block_size, correct)
        scale = total / np.float32(max(valid, 1))
        simd.store_scalar(packets, scale_at, scale)
        plus, minus = simd.broadcast(scale), simd.broadcast(-scale)
        for i in range(0, block_size, LANES):
            decoded = simd.select(simd.load_bits(packets, codes + i // 8), plus, minus)
            simd.store(payload, start + i, simd.subtract(simd.load(payload, start + i), decoded))
        for i in range(valid, block_size):
            payload[start + i] = 0.0
            packets[codes + i // 8] &= ~(1 << i % 8)


@_kernel
def _encode_int8(
    payload: _Floats,
    residual: _Floats,
    packets: _Bytes,
    first: int,
    last: int,
    numel: int,
    block_size: int,
    row_blocks: int,
    row_bytes: int,
) -> None:
    for block in range(first, last):
        start = block * block_size
        scale_at, codes = _locate(block, row_blocks, row_bytes, 1, block_size, 8)
        correct = _needs_residual(payload, residual, start, _valid(block, numel, block_size), block_size)
        scale = _largest(payload, residual, start, block_size, correct) / np.float32(127.0)
        simd.store_scalar(packets, scale_at, scale)
        if scale > 0.0 and np.isfinite(scale):
            _quantize(payload, packets, start, codes, scale, block_size)
        else:
            packets[codes : codes + block_size] = 0
            for i in range(start, start + block_size):
                payload[i] -= np.float32(0.0) * scale


@_helper
def _put(output: _Floats, at: int, value: simd.Vector, rows: int, streaming: bool) -> None:
    """Divide a sum over `rows` rows by their number and write it."""
    mean = simd.divide(value, simd.broadcast(np.float32(rows))) if rows > 1 else value
    if streaming:
        simd.stream(output, at, mean)
    else:
        simd.store(output, at, mean)


@_helper
def _signed(packets: _Bytes, codes: int, scale: np.float32) -> simd.Vector:
    """Sixteen elements of a sign1 packet."""
    return simd.select(simd.load_bits(packets, codes), simd.broadcast(scale), simd.broadcast(-scale))


@_helper
def _scaled(packets: _Bytes, codes: int, scale: np.float32) -> simd.Vector:
    """Sixteen elements of an int8 packet."""
    return simd.multiply(simd.load_int8(packets, codes), simd.broadcast(scale))


@_kernel
def _decode_sign1(
    packets: _Bytes,
    output: _Floats,
    first: int,
    last: int,
    numel: int,
    block_size: int,
    row_blocks: int,
    row_bytes: int,
    rows: int,
    streaming: bool,
) -> None:
    for block in range(first, last):
        start = block * block_size
        scale_at, codes = _locate(block, row_blocks, row_bytes, rows, block_size, 1)
        for i in range(0, block_size, _STEP):
            at = codes + i // 8
            scale = simd.load_scalar(packets, scale_at)
            sum0 = _signed(packets, at, scale)
            sum1 = _signed(packets, at + 2, scale)
            sum2 = _signed(packets, at + 4, scale)
            sum3 = _signed(packets, at + 6, scale)
            for row in range(1, rows):
                at = codes + i // 8 + row * row_bytes
                scale = simd.load_scalar(packets, scale_at + row * row_bytes)
                sum0 = simd.add(sum0, _signed(packets, at, scale))
                sum1 = simd.add(sum1, _signed(packets, at + 2, scale))
                sum2 = simd.add(sum2, _signed(packets, at + 4, scale))
                sum3 = simd.add(sum3, _signed(packets, at + 6, scale))
            _put(output, start + i, sum0, rows, streaming)
            _put(output, start + i + LANES, sum1, rows, streaming)
            _put(output, start + i + 2 * LANES, sum2, rows, streaming)
            _put(output, start + i + 3 * LANES, sum3, rows, streaming)
        output[start + _valid(block, numel, block_size) : start + block_size] = 0.0
    if streaming:
        simd.drain_streams()


@_kernel
def _decode_int8(
    packets: _Bytes,
    output: _Floats,
    first: int,
    last: int,
    numel: int,
    block_size: int,
    row_blocks: int,
    row_bytes: int,
    rows: int,
    streaming: bool,
) -> None:
    for block in range(first, last):
        start = block * block_size
        scale_at, codes = _locate(block, row_blocks, row_bytes, rows, block_size, 8)
        for i in range(0, block_size, LANES):
            total = _scaled(packets, codes + i, simd.load_scalar(packets, scale_at))
            for row in range(1, rows):
                scale = simd.load_scalar(packets, scale_at + row * row_bytes)
                total = simd.add(total, _scaled(packets, codes + i + row * row_bytes, scale))
            _put(output, start + i, total, rows, streaming)
        output[start + _valid(block, numel, block_size) : start + block_size] = 0.0
    if streaming:
        simd.drain_streams()


ENCODE = {"sign1": _encode_sign1, "int8": _encode_int8}
DECODE = {"sign1": _decode_sign1, "int8": _decode_int8}
