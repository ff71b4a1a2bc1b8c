"""The loop of the CPU backend that decodes and averages: a numba function over a range of blocks, without the GIL."""

from __future__ import annotations

import numpy as np

from thinwire.compress.kernels.cpu.blocks import Bytes, Floats, Layout, Place, Range, locate
from thinwire.simd import floats
from thinwire.simd.compiling import helper, kernel
from thinwire.simd.floats import LANES

__all__ = ["decode", "decode_block"]

_STEP = 4 * LANES  # four sums side by side hide the latency of an addition; every block is a multiple


@kernel
def decode(packets: Bytes, layout: Layout, output: Floats, rows: int, streaming: bool, blocks: Range) -> None:
    """Each run of `row_blocks` blocks is the mean of the next `rows` packets; see `reference.decode`."""
    for block in range(blocks.first, blocks.last):
        start, stop = block * layout.block_size, (block + 1) * layout.block_size
        place = locate(layout, block, rows)
        decode_block(packets, place, layout.code_bits, layout.row_bytes, rows, output, start, stop, streaming)
        output[start + place.valid : stop] = 0.0
    if streaming:
        floats.drain_streams()


@helper
def decode_block(
    packets: Bytes,
    place: Place,
    code_bits: int,
    row_bytes: int,
    rows: int,
    output: Floats,
    start: int,
    stop: int,
    streaming: bool,
) -> None:
    """Write the mean of `rows` packets to elements start to stop, padding included."""
    if code_bits == 1:
        _decode_signs(packets, place, row_bytes, rows, output, start, stop, streaming)
    else:
        _decode_levels(packets, place, row_bytes, rows, output, start, stop, streaming)


@helper
def _decode_signs(
    packets: Bytes, place: Place, row_bytes: int, rows: int, output: Floats, start: int, stop: int, streaming: bool
) -> None:
    for i in range(start, stop, _STEP):
        at = place.codes + (i - start) // 8
        scale = floats.load_scalar(packets, place.scale_at)
        sum0 = _signed(packets, at, scale)
        sum1 = _signed(packets, at + 2, scale)
        sum2 = _signed(packets, at + 4, scale)
        sum3 = _signed(packets, at + 6, scale)
        for row in range(1, rows):
            at = place.codes + (i - start) // 8 + row * row_bytes
            scale = floats.load_scalar(packets, place.scale_at + row * row_bytes)
            sum0 = floats.add(sum0, _signed(packets, at, scale))
            sum1 = floats.add(sum1, _signed(packets, at + 2, scale))
            sum2 = floats.add(sum2, _signed(packets, at + 4, scale))
            sum3 = floats.add(sum3, _signed(packets, at + 6, scale))
        _put(output, i, sum0, rows, streaming)
        _put(output, i + LANES, sum1, rows, streaming)
        _put(output, i + 2 * LANES, sum2, rows, streaming)
        _put(output, i + 3 * LANES, sum3, rows, streaming)


@helper
def _decode_levels(
    packets: Bytes, place: Place, row_bytes: int, rows: int, output: Floats, start: int, stop: int, streaming: bool
) -> None:
    for i in range(start, stop, LANES):
        at = place.codes + i - start
        total = _scaled(packets, at, floats.load_scalar(packets, place.scale_at))
        for row in range(1, rows):
            scale = floats.load_scalar(packets, place.scale_at + row * row_bytes)
            total = floats.add(total, _scaled(packets, at + row * row_bytes, scale))
        _put(output, i, total, rows, streaming)


@helper
def _signed(packets: Bytes, codes: int, scale: np.float32) -> floats.Vector:
    """Sixteen elements of a sign1 packet."""
    return floats.select(floats.load_bits(packets, codes), floats.broadcast(scale), floats.broadcast(-scale))


@helper
def _scaled(packets: Bytes, codes: int, scale: np.float32) -> floats.Vector:
    """Sixteen elements of an int8 packet."""
    return floats.multiply(floats.load_int8(packets, codes), floats.broadcast(scale))


@helper
def _put(output: Floats, at: int, value: floats.Vector, rows: int, streaming: bool) -> None:
    """Divide a sum over `rows` rows by their number and write it."""
    mean = floats.divide(value, floats.broadcast(np.float32(rows))) if rows > 1 else value
    if streaming:
        floats.stream(output, at, mean)
    else:
        floats.store(output, at, mean)
