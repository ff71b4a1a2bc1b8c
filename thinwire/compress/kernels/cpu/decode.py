"""The loops of the CPU backend that decode and average: numba functions over a range of blocks, without the GIL."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.compress.kernels.cpu.blocks import locate, valid_elements
from thinwire.simd import floats
from thinwire.simd.compiling import helper, kernel
from thinwire.simd.floats import LANES

__all__ = ["DECODE"]

_Floats = NDArray[np.float32]
_Bytes = NDArray[np.uint8]

_STEP = 4 * LANES  # four sums side by side hide the latency of an addition; every block is a multiple


@helper
def _put(output: _Floats, at: int, value: floats.Vector, rows: int, streaming: bool) -> None:
    """Divide a sum over `rows` rows by their number and write it."""
    mean = floats.divide(value, floats.broadcast(np.float32(rows))) if rows > 1 else value
    if streaming:
        floats.stream(output, at, mean)
    else:
        floats.store(output, at, mean)


@helper
def _signed(packets: _Bytes, codes: int, scale: np.float32) -> floats.Vector:
    """Sixteen elements of a sign1 packet."""
    return floats.select(floats.load_bits(packets, codes), floats.broadcast(scale), floats.broadcast(-scale))


@helper
def _scaled(packets: _Bytes, codes: int, scale: np.float32) -> floats.Vector:
    """Sixteen elements of an int8 packet."""
    return floats.multiply(floats.load_int8(packets, codes), floats.broadcast(scale))


@kernel
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
        scale_at, codes = locate(block, row_blocks, row_bytes, rows, block_size, 1)
        for i in range(0, block_size, _STEP):
            at = codes + i // 8
            scale = floats.load_scalar(packets, scale_at)
            sum0 = _signed(packets, at, scale)
            sum1 = _signed(packets, at + 2, scale)
            sum2 = _signed(packets, at + 4, scale)
            sum3 = _signed(packets, at + 6, scale)
            for row in range(1, rows):
                at = codes + i // 8 + row * row_bytes
                scale = floats.load_scalar(packets, scale_at + row * row_bytes)
                sum0 = floats.add(sum0, _signed(packets, at, scale))
                sum1 = floats.add(sum1, _signed(packets, at + 2, scale))
                sum2 = floats.add(sum2, _signed(packets, at + 4, scale))
                sum3 = floats.add(sum3, _signed(packets, at + 6, scale))
            _put(output, start + i, sum0, rows, streaming)
            _put(output, start + i + LANES, sum1, rows, streaming)
            _put(output, start + i + 2 * LANES, sum2, rows, streaming)
            _put(output, start + i + 3 * LANES, sum3, rows, streaming)
        output[start + valid_elements(block, numel, block_size) : start + block_size] = 0.0
    if streaming:
        floats.drain_streams()


@kernel
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
        scale_at, codes = locate(block, row_blocks, row_bytes, rows, block_size, 8)
        for i in range(0, block_size, LANES):
            total = _scaled(packets, codes + i, floats.load_scalar(packets, scale_at))
            for row in range(1, rows):
                scale = floats.load_scalar(packets, scale_at + row * row_bytes)
                total = floats.add(total, _scaled(packets, codes + i + row * row_bytes, scale))
            _put(output, start + i, total, rows, streaming)
        output[start + valid_elements(block, numel, block_size) : start + block_size] = 0.0
    if streaming:
        floats.drain_streams()


DECODE = {"sign1": _decode_sign1, "int8": _decode_int8}
