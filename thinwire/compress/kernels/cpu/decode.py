"""The loop of the CPU backend that decodes and averages: a numba function over a range of blocks, without the GIL."""

from __future__ import annotations

import numpy as np

from thinwire.compress.kernels.cpu import small_floats
from thinwire.compress.kernels.cpu.blocks import (
    FP8,
    INT4,
    INT8,
    SIGN1,
    STAT2,
    STEP,
    Bytes,
    Floats,
    Layout,
    Place,
    Range,
    place_in_part,
    start_of,
)
from thinwire.compress.kernels.cpu.encode import magnitudes_at
from thinwire.compress.packet_layout import SCALE_BYTES
from thinwire.simd import floats, integers
from thinwire.simd.building import LANES
from thinwire.simd.compiling import helper, inner, kernel


@kernel
def decode(packets: Bytes, output: Floats, rows: int, streaming: bool, layout: Layout, blocks: Range) -> None:
    """Each block is the mean of `rows` packets, of one or of all; see `reference.decode`."""
    for block in range(blocks.first, blocks.last):
        start = start_of(layout, block)
        stop, place = start + layout.block_size, place_in_part(layout, block, start)
        decode_block(packets, place, layout.form.codec, layout.row_bytes, rows, output, start, stop, streaming)
        if place.valid < layout.block_size:  # to make an empty slice takes as long as to decode a small block
            output[start + place.valid : stop] = 0.0
    if streaming:
        floats.drain_streams()


@inner
def decode_block(
    packets: Bytes,
    place: Place,
    codec: int,
    row_bytes: int,
    rows: int,
    output: Floats,
    start: int,
    stop: int,
    streaming: bool,
) -> None:
    """Write the mean of `rows` packets to elements start to stop, padding included."""
    if codec == SIGN1:
        decode_signs(packets, place, row_bytes, rows, output, start, stop, streaming)
    elif codec == STAT2:
        _decode_two_magnitudes(packets, place, row_bytes, rows, output, start, stop, streaming)
    elif codec == INT4:
        _decode_levels(packets, place, row_bytes, rows, output, start, stop, streaming, INT4)
    elif codec == FP8:
        _decode_levels(packets, place, row_bytes, rows, output, start, stop, streaming, FP8)
    else:
        _decode_levels(packets, place, row_bytes, rows, output, start, stop, streaming, INT8)


@helper
def decode_signs(
    packets: Bytes, place: Place, row_bytes: int, rows: int, output: Floats, start: int, stop: int, streaming: bool
) -> None:
    """What `decode_block` does of sign1."""
    for i in range(start, stop, STEP):
        value0, value1, value2, value3 = mean_of_signs(packets, place, row_bytes, rows, i - start)
        _put(output, i, value0, streaming)
        _put(output, i + LANES, value1, streaming)
        _put(output, i + 2 * LANES, value2, streaming)
        _put(output, i + 3 * LANES, value3, streaming)


@inner
def mean_of_signs(
    packets: Bytes, place: Place, row_bytes: int, rows: int, first: int
) -> tuple[floats.Vector, floats.Vector, floats.Vector, floats.Vector]:
    """The mean of `rows` sign1 packets for the 64 elements from a block's element `first` on."""
    at = place.codes + first // 8
    scale = floats.load_scalar(packets, place.scale_at)
    sum0 = _signed(packets, at, scale)
    sum1 = _signed(packets, at + 2, scale)
    sum2 = _signed(packets, at + 4, scale)
    sum3 = _signed(packets, at + 6, scale)
    for row in range(1, rows):
        at = place.codes + first // 8 + row * row_bytes
        scale = floats.load_scalar(packets, place.scale_at + row * row_bytes)
        sum0 = floats.add(sum0, _signed(packets, at, scale))
        sum1 = floats.add(sum1, _signed(packets, at + 2, scale))
        sum2 = floats.add(sum2, _signed(packets, at + 4, scale))
        sum3 = floats.add(sum3, _signed(packets, at + 6, scale))
    return _mean(sum0, rows), _mean(sum1, rows), _mean(sum2, rows), _mean(sum3, rows)


@helper
def _decode_two_magnitudes(
    packets: Bytes, place: Place, row_bytes: int, rows: int, output: Floats, start: int, stop: int, streaming: bool
) -> None:
    plane = (stop - start) // 8
    for i in range(start, stop, LANES):
        at = place.codes + (i - start) // 8
        small = floats.load_scalar(packets, place.scale_at)
        large = floats.load_scalar(packets, place.scale_at + SCALE_BYTES)
        total = magnitudes_at(packets, at, plane, small, large)
        for row in range(1, rows):
            skipped = row * row_bytes
            small = floats.load_scalar(packets, place.scale_at + skipped)
            large = floats.load_scalar(packets, place.scale_at + skipped + SCALE_BYTES)
            total = floats.add(total, magnitudes_at(packets, at + skipped, plane, small, large))
        _put(output, i, _mean(total, rows), streaming)


@inner
def _decode_levels(
    packets: Bytes,
    place: Place,
    row_bytes: int,
    rows: int,
    output: Floats,
    start: int,
    stop: int,
    streaming: bool,
    codec: int,
) -> None:
    for i in range(start, stop, LANES):
        at = place.codes + ((i - start) // 2 if codec == INT4 else i - start)
        total = _scaled(packets, at, floats.load_scalar(packets, place.scale_at), codec)
        for row in range(1, rows):
            scale = floats.load_scalar(packets, place.scale_at + row * row_bytes)
            total = floats.add(total, _scaled(packets, at + row * row_bytes, scale, codec))
        _put(output, i, _mean(total, rows), streaming)


@helper
def _signed(packets: Bytes, codes: int, scale: np.float32) -> floats.Vector:
    """Sixteen elements of a sign1 packet."""
    return floats.select(floats.load_bits(packets, codes), floats.broadcast(scale), floats.broadcast(-scale))


@inner
def _scaled(packets: Bytes, codes: int, scale: np.float32, codec: int) -> floats.Vector:
    """Sixteen elements of a packet of levels."""
    if codec == INT4:
        level = floats.load_int4(packets, codes)
    elif codec == FP8:
        level = small_floats.widened(integers.load_8_bits(packets, codes))
    else:
        level = floats.load_int8(packets, codes)
    return floats.multiply(level, floats.broadcast(scale))


@inner
def _mean(total: floats.Vector, rows: int) -> floats.Vector:
    return floats.divide(total, floats.broadcast(np.float32(rows))) if rows > 1 else total


@inner
def _put(output: Floats, at: int, value: floats.Vector, streaming: bool) -> None:
    if streaming:
        floats.stream(output, at, value)
    else:
        floats.store(output, at, value)
