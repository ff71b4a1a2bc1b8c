"""The loops of the CPU backend that make what a rank contributes and encode it, block by block: a block is written
once, in the first-level cache, before it is encoded there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.compress.kernels.cpu.blocks import (
    ADDRESS,
    END,
    FIRST,
    KIND,
    SIGN1,
    STEP,
    Bytes,
    Floats,
    Layout,
    Place,
    Range,
    Table,
    covers,
    first_run,
    place_in_part,
    start_of,
    store_step,
)
from thinwire.compress.kernels.cpu.decode import decode_block, decode_signs, mean_of_signs
from thinwire.compress.kernels.cpu.encode import (
    add_and_store,
    encode_block,
    encode_signs,
    lose_signs,
    no_sums,
    pack_step,
    store_rounded_block,
    total_of,
)
from thinwire.compress.kernels.cpu.small_floats import ELEMENT_BYTES, NO_VALUES, Values, some_of, widen_at
from thinwire.simd import floats, integers, memory
from thinwire.simd.building import LANES
from thinwire.simd.compiling import helper, inner, kernel

PLAIN, DIVIDED, MASKED = range(3)
_BETA1, _GAIN, _DIVISOR = range(3)


class Factors(NamedTuple):
    """Of the last momentum, of the gradient, and what the gradient is divided by."""

    beta1: np.float32
    gain: np.float32
    loss_scale: np.float32


class Vectors(NamedTuple):
    """Where the flat float32 vectors of a bucket lie: addresses, 0 for one that is missing."""

    momentum: int
    denominators: int
    residual: int


@kernel
def encode_payload(
    runs: Table,
    factors: NDArray[np.float32],
    form: int,
    vectors: Vectors,
    lost: Floats,
    packets: Bytes,
    part: Layout,
    blocks: Range,
) -> None:
    """Execute `bucket_reference.encode_payload`. `factors`: β₁, gain and divisor of each run."""
    nothing = np.empty(0, dtype=np.float32)
    lost_at = lost.ctypes.data
    for block in range(blocks.first, blocks.last):
        start = start_of(part, block)
        stop = start + part.block_size
        run = first_run(runs, start)
        if part.form.codec == SIGN1 and covers(runs, run, start, stop):
            kind, place = runs[run, KIND], place_in_part(part, block, start)
            gradient = runs[run, ADDRESS] + (start - runs[run, FIRST]) * ELEMENT_BYTES[kind]
            of_run = Factors(factors[run, _BETA1], factors[run, _GAIN], factors[run, _DIVISOR])
            total = _pack_run(gradient, kind, of_run, form, vectors, lost_at, start, stop, packets, place.codes)
            lose_signs(lost_at + 4 * start, packets, part.block_size, place, total)
            continue
        while run < runs.shape[0] and runs[run, FIRST] < stop:
            low, high = max(runs[run, FIRST], start), min(runs[run, END], stop)
            kind = runs[run, KIND]
            gradient = runs[run, ADDRESS] + (low - runs[run, FIRST]) * ELEMENT_BYTES[kind]
            of_run = Factors(factors[run, _BETA1], factors[run, _GAIN], factors[run, _DIVISOR])
            _fill(gradient, kind, of_run, form, vectors, lost_at, low, high)
            run += 1
        encode_block(lost, nothing, start, packets, part.block_size, part.form.codec, place_in_part(part, block, start))


@helper
def _pack_run(
    gradient: int,
    kind: int,
    factors: Factors,
    form: int,
    vectors: Vectors,
    lost: int,
    low: int,
    high: int,
    packets: Bytes,
    codes: int,
) -> floats.Scalar:
    """What `_fill` does for a whole block; write its signs at byte `codes` too, and return the sum of magnitudes."""
    sums = no_sums()
    for at in range(low, high, STEP):
        new = gradient + ELEMENT_BYTES[kind] * (at - low)
        size = ELEMENT_BYTES[kind] * LANES
        value0 = _payload(new, kind, factors, form, vectors, at, LANES)
        value1 = _payload(new + size, kind, factors, form, vectors, at + LANES, LANES)
        value2 = _payload(new + 2 * size, kind, factors, form, vectors, at + 2 * LANES, LANES)
        value3 = _payload(new + 3 * size, kind, factors, form, vectors, at + 3 * LANES, LANES)
        store_step(lost + 4 * at, value0, value1, value2, value3)
        sums = pack_step(packets, codes + (at - low) // 8, sums, value0, value1, value2, value3)
    return total_of(sums)


@inner
def _payload(
    new_at: int, kind: int, factors: Factors, form: int, vectors: Vectors, at: int, count: int
) -> floats.Vector:
    """Payload + residual of the first `count` of sixteen elements from element `at` on, whose gradients lie at an
    address."""
    one = floats.broadcast(np.float32(1.0))
    before = memory.load_some_floats(vectors.momentum + 4 * at, count)
    denominators = memory.load_some_floats(vectors.denominators + 4 * at, count) if form != PLAIN else one
    u = _contribution(widen_at(new_at, kind, count), kind, before, denominators, factors, form)
    return floats.add(u, memory.load_some_floats(vectors.residual + 4 * at, count)) if vectors.residual else u


@helper
def _fill(
    gradient: int, kind: int, factors: Factors, form: int, vectors: Vectors, lost: int, low: int, high: int
) -> None:
    """Write payload + residual to elements low to high of the vector at `lost`."""
    size, behind = ELEMENT_BYTES[kind], low + (high - low) // LANES * LANES
    for at in range(low, behind, LANES):
        u = _payload(gradient + size * (at - low), kind, factors, form, vectors, at, LANES)
        memory.store_floats(lost + 4 * at, u)
    if behind < high:
        u = _payload(gradient + size * (behind - low), kind, factors, form, vectors, behind, high - behind)
        memory.store_some_floats(lost + 4 * behind, u, high - behind)


@inner
def _contribution(
    new: floats.Vector, kind: int, before: floats.Vector, denominators: floats.Vector, factors: Factors, form: int
) -> floats.Vector:
    """u of sixteen elements, from their gradients and momentum."""
    if kind == NO_VALUES:
        u = floats.multiply(before, floats.broadcast(factors.beta1))
    else:
        if factors.loss_scale != 1.0:
            new = floats.divide(new, floats.broadcast(factors.loss_scale))
        if form == DIVIDED:
            new = floats.divide(new, denominators)
        small = factors.gain < 0.5
        weight = floats.broadcast(factors.gain if small else factors.gain - np.float32(1.0))
        u = floats.multiply_add(weight, floats.subtract(new, before), before if small else new)
        if form == MASKED:
            finite = floats.below(floats.absolute(denominators), floats.broadcast(np.float32(np.inf)))
            zero, one = floats.broadcast(np.float32(0.0)), floats.broadcast(np.float32(1.0))
            u = floats.multiply(u, floats.select(finite, one, zero))
    return u


@kernel
def average_and_encode(
    received: Bytes,
    workers: int,
    mask: Bytes,
    residual: Floats,
    lost: Floats,
    packets: Bytes,
    layout: Layout,
    blocks: Range,
) -> None:
    """Execute `bucket_reference.average_and_encode`; an empty residual or mask is none. `layout`: of each row of
    `received`, and of the packet."""
    size, codec = layout.block_size, layout.form.codec
    for block in range(blocks.first, blocks.last):
        start = start_of(layout, block)
        place = place_in_part(layout, block, start)
        if codec == SIGN1 and place.valid == size:
            lost_at = lost.ctypes.data + 4 * start
            residual_at = residual.ctypes.data + 4 * start if residual.size else 0
            of_block = mask[start : start + size] if mask.size else mask
            total = _pack_average(
                received, place, layout.row_bytes, workers, of_block, residual_at, lost_at, packets, size
            )
            lose_signs(lost_at, packets, size, place, total)
        else:
            decode_block(received, place, codec, layout.row_bytes, workers, lost, start, start + size, False)
            if mask.size:
                for i in range(start, start + size, LANES):
                    floats.store(lost, i, _masked(floats.load(lost, i), mask, i))
            encode_block(lost, residual, start, packets, size, codec, place)


@helper
def _pack_average(
    received: Bytes,
    place: Place,
    row_bytes: int,
    workers: int,
    mask: Bytes,
    residual: int,
    lost: int,
    packets: Bytes,
    size: int,
) -> floats.Scalar:
    """Write a block's average, masked unless the mask is empty, plus the residual at an address that is not 0, to the
    address `lost`, and its signs; return the sum of magnitudes."""
    sums = no_sums()
    for i in range(0, size, STEP):
        value0, value1, value2, value3 = mean_of_signs(received, place, row_bytes, workers, i)
        if mask.size:
            value0, value1 = _masked(value0, mask, i), _masked(value1, mask, i + LANES)
            value2, value3 = _masked(value2, mask, i + 2 * LANES), _masked(value3, mask, i + 3 * LANES)
        if residual:
            at = residual + 4 * i
            value0 = floats.add(value0, memory.load_floats(at))
            value1 = floats.add(value1, memory.load_floats(at + 4 * LANES))
            value2 = floats.add(value2, memory.load_floats(at + 8 * LANES))
            value3 = floats.add(value3, memory.load_floats(at + 12 * LANES))
        store_step(lost + 4 * i, value0, value1, value2, value3)
        sums = pack_step(packets, place.codes + i // 8, sums, value0, value1, value2, value3)
    return total_of(sums)


@inner
def _masked(value: floats.Vector, mask: Bytes, at: int) -> floats.Vector:
    """Sixteen elements, times 0 where the mask is 0 from element `at` on."""
    kept = integers.below(integers.broadcast(np.uint32(0)), integers.load_8_bits(mask, at))
    one, zero = floats.broadcast(np.float32(1.0)), floats.broadcast(np.float32(0.0))
    return floats.multiply(value, floats.select(kept, one, zero))


@kernel
def encode_packed_payload(
    runs: Table,
    factors: NDArray[np.float32],
    tables: NDArray[np.float32],
    state: Bytes,
    whole: Layout,
    codes: Bytes,
    residual: Values,
    lost: Values,
    packets: Bytes,
    part: Layout,
    blocks: Range,
) -> None:
    """Execute `bucket_reference.encode_packed_payload`; `state` is the momentum's packets, laid out as `whole`."""
    nothing = np.empty(0, dtype=np.float32)
    payload = np.empty(part.block_size, dtype=np.float32)
    for block in range(blocks.first, blocks.last):
        start = start_of(part, block)
        stop = start + part.block_size
        place = place_in_part(whole, start // part.block_size, start)
        decode_signs(state, place, whole.row_bytes, 1, payload, 0, part.block_size, False)
        run = first_run(runs, start)
        while run < runs.shape[0] and runs[run, FIRST] < stop:
            low, high = max(runs[run, FIRST], start), min(runs[run, END], stop)
            kind = runs[run, KIND]
            gradient = runs[run, ADDRESS] + (low - runs[run, FIRST]) * ELEMENT_BYTES[kind]
            of_run = Factors(factors[run, _BETA1], factors[run, _GAIN], factors[run, _DIVISOR])
            _follow(gradient, kind, of_run, codes, tables[run], low, payload[low - start : high - start])
            run += 1
        place = place_in_part(part, block, start)
        payload[place.valid :] = 0.0
        add_and_store(payload, residual.memory, residual.kind, start, payload)
        encode_signs(payload, nothing, packets, 0, part.block_size, place, False)
        store_rounded_block(payload, lost.memory, lost.kind, start)


@helper
def _follow(
    gradient: int, kind: int, factors: Factors, codes: Bytes, table: Floats, first: int, payload: Floats
) -> None:
    """Turn u, in `payload`, into the next contribution; its codes are those from number `first` on."""
    size, payload_at = ELEMENT_BYTES[kind], payload.ctypes.data
    behind = payload.size // LANES * LANES
    for i in range(0, behind, LANES):
        before, new = memory.load_floats(payload_at + 4 * i), widen_at(gradient + size * i, kind, LANES)
        memory.store_floats(payload_at + 4 * i, _followed(new, before, codes, table, first + i, factors))
    count = payload.size - behind
    if count:
        some_codes = some_of(codes, first + behind, 0, count, 1)
        before, new = (
            memory.load_some_floats(payload_at + 4 * behind, count),
            widen_at(gradient + size * behind, kind, count),
        )
        memory.store_some_floats(payload_at + 4 * behind, _followed(new, before, some_codes, table, 0, factors), count)


@inner
def _followed(
    new: floats.Vector, before: floats.Vector, codes: Bytes, table: Floats, first: int, factors: Factors
) -> floats.Vector:
    """Sixteen elements, whose codes are those from number `first` on; those move whose code is not 0."""
    zero, factor = floats.broadcast(np.float32(0.0)), integers.look_up(table, codes, first)
    moving = integers.below(integers.broadcast(np.uint32(0)), integers.load_8_bits(codes, first))
    if factors.loss_scale != 1.0:
        new = floats.divide(new, floats.broadcast(factors.loss_scale))
    kept = floats.select(moving, floats.multiply(before, floats.broadcast(factors.beta1)), zero)
    change = floats.multiply(floats.broadcast(factors.gain), new)
    return floats.add(kept, floats.multiply(change, floats.select(moving, factor, zero)))
