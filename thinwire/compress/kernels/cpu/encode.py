"""The loops of the CPU backend that encode: numba functions over a range of blocks, without the GIL.

A block is read from memory once and stays in the first-level cache for the passes that follow, so the speed
is that of the memory. Ranges, not numba's own threads: those abort when several Python threads, such as
in-process ranks, enter them at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.compress.kernels.cpu.blocks import locate, valid_elements
from thinwire.compress.kernels.cpu.halves import BFLOAT16, NO_VALUES, round_to_nearest, widen
from thinwire.simd import floats
from thinwire.simd.compiling import helper, kernel
from thinwire.simd.floats import LANES

__all__ = ["ENCODE", "ENCODE_ROUNDED"]

_Floats = NDArray[np.float32]
_Bytes = NDArray[np.uint8]

_STEP = 4 * LANES  # four sums side by side hide the latency of an addition; every block is a multiple


@helper
def _needs_residual(payload: _Floats, residual: _Floats, start: int, valid: int, block_size: int) -> bool:
    """Whether a residual is yet to be added; a block that ends in padding gets it here, and zeros behind."""
    if valid == block_size:
        return residual.size > 0
    if residual.size:
        for i in range(start, start + valid):
            payload[i] += residual[i]
    payload[start + valid : start + block_size] = 0.0
    return False


@helper
def _corrected(payload: _Floats, residual: _Floats, at: int, correct: bool) -> floats.Vector:
    value = floats.load(payload, at)
    return floats.add(value, floats.load(residual, at)) if correct else value


@helper
def _pack_signs(
    payload: _Floats, residual: _Floats, packets: _Bytes, start: int, codes: int, block_size: int, correct: bool
) -> floats.Scalar:
    """Payload += residual if `correct`; write its sign bits at byte `codes`; return the sum of magnitudes."""
    zero = floats.broadcast(np.float32(0.0))
    sum0, sum1, sum2, sum3 = zero, zero, zero, zero
    for i in range(0, block_size, _STEP):
        at = start + i
        value0 = _corrected(payload, residual, at, correct)
        value1 = _corrected(payload, residual, at + LANES, correct)
        value2 = _corrected(payload, residual, at + 2 * LANES, correct)
        value3 = _corrected(payload, residual, at + 3 * LANES, correct)
        if correct:
            floats.store(payload, at, value0)
            floats.store(payload, at + LANES, value1)
            floats.store(payload, at + 2 * LANES, value2)
            floats.store(payload, at + 3 * LANES, value3)
        sum0 = floats.add(sum0, floats.absolute(value0))
        sum1 = floats.add(sum1, floats.absolute(value1))
        sum2 = floats.add(sum2, floats.absolute(value2))
        sum3 = floats.add(sum3, floats.absolute(value3))
        bits = codes + i // 8
        floats.store_bits(packets, bits, floats.nonnegative(value0))
        floats.store_bits(packets, bits + 2, floats.nonnegative(value1))
        floats.store_bits(packets, bits + 4, floats.nonnegative(value2))
        floats.store_bits(packets, bits + 6, floats.nonnegative(value3))
    return floats.reduce_sum(floats.add(floats.add(sum0, sum1), floats.add(sum2, sum3)))


@helper
def _largest(payload: _Floats, residual: _Floats, start: int, block_size: int, correct: bool) -> floats.Scalar:
    """Payload += residual if `correct`; return its largest magnitude, NaN if it holds one."""
    largest = floats.broadcast(np.float32(0.0))
    for at in range(start, start + block_size, LANES):
        value = _corrected(payload, residual, at, correct)
        if correct:
            floats.store(payload, at, value)
        largest = floats.maximum(largest, floats.absolute(value))
    return floats.reduce_max(largest)


@helper
def _quantize(payload: _Floats, packets: _Bytes, start: int, codes: int, scale: np.float32, block_size: int) -> None:
    """Write the codes of a block at byte `codes`, and leave what they lose in `payload`."""
    divisor = floats.broadcast(scale)
    top = floats.broadcast(np.float32(127.0))
    bottom = floats.broadcast(np.float32(-127.0))
    for i in range(0, block_size, LANES):
        value = floats.load(payload, start + i)
        level = floats.clamp(floats.nearest(floats.divide(value, divisor)), bottom, top)
        floats.store_int8(packets, codes + i, level)
        floats.store(payload, start + i, floats.subtract(value, floats.multiply(level, divisor)))


@helper
def _encode_sign1_block(
    payload: _Floats,
    residual: _Floats,
    packets: _Bytes,
    start: int,
    scale_at: int,
    codes: int,
    valid: int,
    block_size: int,
) -> None:
    correct = _needs_residual(payload, residual, start, valid, block_size)
    total = _pack_signs(payload, residual, packets, start, codes, block_size, correct)
    scale = total / np.float32(max(valid, 1))
    floats.store_scalar(packets, scale_at, scale)
    plus, minus = floats.broadcast(scale), floats.broadcast(-scale)
    for i in range(0, block_size, LANES):
        decoded = floats.select(floats.load_bits(packets, codes + i // 8), plus, minus)
        floats.store(payload, start + i, floats.subtract(floats.load(payload, start + i), decoded))
    for i in range(valid, block_size):
        payload[start + i] = 0.0
        packets[codes + i // 8] &= ~(1 << i % 8)


@helper
def _encode_int8_block(
    payload: _Floats,
    residual: _Floats,
    packets: _Bytes,
    start: int,
    scale_at: int,
    codes: int,
    valid: int,
    block_size: int,
) -> None:
    correct = _needs_residual(payload, residual, start, valid, block_size)
    scale = _largest(payload, residual, start, block_size, correct) / np.float32(127.0)
    floats.store_scalar(packets, scale_at, scale)
    if scale > 0.0 and np.isfinite(scale):
        _quantize(payload, packets, start, codes, scale, block_size)
    else:
        packets[codes : codes + block_size] = 0
        for i in range(start, start + block_size):
            payload[i] -= np.float32(0.0) * scale


@kernel
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
        valid = valid_elements(block, numel, block_size)
        scale_at, codes = locate(block, row_blocks, row_bytes, 1, block_size, 1)
        _encode_sign1_block(payload, residual, packets, start, scale_at, codes, valid, block_size)


@kernel
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
        valid = valid_elements(block, numel, block_size)
        scale_at, codes = locate(block, row_blocks, row_bytes, 1, block_size, 8)
        _encode_int8_block(payload, residual, packets, start, scale_at, codes, valid, block_size)


@helper
def _correct(payload: _Floats, residual: _Bytes, start: int, corrected: _Floats) -> None:
    """Write a block of payload + residual, which are bf16 if there are any, to `corrected`."""
    kind = BFLOAT16 if residual.size else NO_VALUES
    for i in range(0, corrected.size, LANES):
        value = floats.add(floats.load(payload, start + i), widen(residual, start + i, kind))
        floats.store(corrected, i, value)


@helper
def _round(lost: _Floats, new_residual: _Bytes, start: int) -> None:
    for i in range(0, lost.size, LANES):
        round_to_nearest(new_residual, start + i, floats.load(lost, i))


@kernel
def _encode_rounded_sign1(
    payload: _Floats,
    residual: _Bytes,
    new_residual: _Bytes,
    packets: _Bytes,
    first: int,
    last: int,
    numel: int,
    block_size: int,
    row_blocks: int,
    row_bytes: int,
) -> None:
    nothing = np.empty(0, dtype=np.float32)
    corrected = np.empty(block_size, dtype=np.float32)
    for block in range(first, last):
        start = block * block_size
        valid = valid_elements(block, numel, block_size)
        scale_at, codes = locate(block, row_blocks, row_bytes, 1, block_size, 1)
        _correct(payload, residual, start, corrected)
        _encode_sign1_block(corrected, nothing, packets, 0, scale_at, codes, valid, block_size)
        _round(corrected, new_residual, start)


@kernel
def _encode_rounded_int8(
    payload: _Floats,
    residual: _Bytes,
    new_residual: _Bytes,
    packets: _Bytes,
    first: int,
    last: int,
    numel: int,
    block_size: int,
    row_blocks: int,
    row_bytes: int,
) -> None:
    nothing = np.empty(0, dtype=np.float32)
    corrected = np.empty(block_size, dtype=np.float32)
    for block in range(first, last):
        start = block * block_size
        valid = valid_elements(block, numel, block_size)
        scale_at, codes = locate(block, row_blocks, row_bytes, 1, block_size, 8)
        _correct(payload, residual, start, corrected)
        _encode_int8_block(corrected, nothing, packets, 0, scale_at, codes, valid, block_size)
        _round(corrected, new_residual, start)


ENCODE = {"sign1": _encode_sign1, "int8": _encode_int8}
ENCODE_ROUNDED = {"sign1": _encode_rounded_sign1, "int8": _encode_rounded_int8}
