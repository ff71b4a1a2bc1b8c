"""The loops of the CPU backend that make what a rank contributes and encode it, block by block: a block is written
once, in the first-level cache, before it is encoded there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.compress.kernels.cpu.blocks import Bytes, Floats, Layout, Range, locate
from thinwire.compress.kernels.cpu.decode import decode_block
from thinwire.compress.kernels.cpu.encode import add_and_store, encode_block, store_rounded_block
from thinwire.compress.kernels.cpu.halves import ELEMENT_BYTES, NO_VALUES, Values, some_of, widen
from thinwire.compress.kernels.cpu.momentum import Factors, Preconditioner, momentum_payload
from thinwire.compress.kernels.cpu.runs import (
    ADDRESS,
    END,
    FIRST,
    KIND,
    PartLayout,
    Table,
    first_run,
    place_in_part,
    start_of,
)
from thinwire.simd import floats
from thinwire.simd.compiling import helper, kernel
from thinwire.simd.floats import LANES
from thinwire.simd.memory import bytes_at

__all__ = ["DIVIDED", "MASKED", "PLAIN", "average_and_encode", "encode_packed_payload", "encode_payload"]

PLAIN, DIVIDED, MASKED = range(3)
_BETA1, _GAIN, _DIVISOR = range(3)


@kernel
def encode_payload(
    runs: Table,
    factors: NDArray[np.float32],
    form: int,
    momentum: Floats,
    denominators: Floats,
    residual: Floats,
    lost: Floats,
    packets: Bytes,
    part: PartLayout,
    blocks: Range,
) -> None:
    """See `bucket_reference.encode_payload`; an empty residual is none. `factors`: β₁, gain and divisor of each run."""
    nothing = np.empty(0, dtype=np.float32)
    for block in range(blocks.first, blocks.last):
        start = start_of(part, block)
        stop = start + part.block_size
        run = first_run(runs, start)
        while run < runs.shape[0] and runs[run, FIRST] < stop:
            low, high = max(runs[run, FIRST], start), min(runs[run, END], stop)
            kind = runs[run, KIND]
            size = ELEMENT_BYTES[kind]
            address = runs[run, ADDRESS] + (low - runs[run, FIRST]) * size
            gradient = bytes_at(address, (high - low) * size)
            _fill(gradient, kind, factors[run], form, momentum, denominators, residual, lost, low, high)
            run += 1
        encode_block(lost, nothing, start, packets, part.block_size, part.code_bits, place_in_part(part, block, start))


@helper
def _fill(
    gradient: Bytes,
    kind: int,
    factors: Floats,
    form: int,
    momentum: Floats,
    denominators: Floats,
    residual: Floats,
    lost: Floats,
    low: int,
    high: int,
) -> None:
    """Write payload + residual to elements low to high of `lost`."""
    beta1, gain, divisor = factors[_BETA1], factors[_GAIN], factors[_DIVISOR]
    behind = low + (high - low) // LANES * LANES
    for at in range(low, behind, LANES):
        u = _contribution(gradient, at - low, kind, beta1, gain, divisor, form, momentum, denominators, at)
        floats.store(lost, at, floats.add(u, floats.load(residual, at)) if residual.size else u)
    if behind < high:
        count = high - behind
        some = some_of(gradient, behind - low, 0, count, ELEMENT_BYTES[kind])
        some_momentum, some_denominators = np.zeros(LANES, np.float32), np.ones(LANES, np.float32)
        some_residual, some_lost = np.zeros(LANES, np.float32), np.empty(LANES, np.float32)
        some_momentum[:count] = momentum[behind:high]
        if denominators.size:
            some_denominators[:count] = denominators[behind:high]
        u = _contribution(some, 0, kind, beta1, gain, divisor, form, some_momentum, some_denominators, 0)
        if residual.size:
            some_residual[:count] = residual[behind:high]
            u = floats.add(u, floats.load(some_residual, 0))
        floats.store(some_lost, 0, u)
        lost[behind:high] = some_lost[:count]


@helper
def _contribution(
    gradient: Bytes,
    of_run: int,
    kind: int,
    beta1: np.float32,
    gain: np.float32,
    divisor: np.float32,
    form: int,
    momentum: Floats,
    denominators: Floats,
    at: int,
) -> floats.Vector:
    """Sixteen elements, from number `of_run` of the gradient on, and `at` of the others."""
    before = floats.load(momentum, at)
    if kind == NO_VALUES:
        return floats.multiply(before, floats.broadcast(beta1))
    new = widen(gradient, of_run, kind)
    if divisor != 1.0:
        new = floats.divide(new, floats.broadcast(divisor))
    if form == DIVIDED:
        new = floats.divide(new, floats.load(denominators, at))
    change = floats.subtract(new, before)
    if gain < 0.5:
        u = floats.multiply_add(floats.broadcast(gain), change, before)
    else:
        u = floats.multiply_add(floats.broadcast(gain - np.float32(1.0)), change, new)
    if form == MASKED:
        magnitude = floats.absolute(floats.load(denominators, at))
        finite = floats.below(magnitude, floats.broadcast(np.float32(np.inf)))
        zero, one = floats.broadcast(np.float32(0.0)), floats.broadcast(np.float32(1.0))
        u = floats.multiply(u, floats.select(finite, one, zero))
    return u


@kernel
def average_and_encode(
    received: Bytes,
    workers: int,
    incoming: Layout,
    residual: Floats,
    lost: Floats,
    packets: Bytes,
    outgoing: Layout,
    blocks: Range,
) -> None:
    """See `bucket_reference.average_and_encode`; an empty residual is none."""
    size, bits = incoming.block_size, incoming.code_bits
    for block in range(blocks.first, blocks.last):
        start = block * size
        place = locate(incoming, block, workers)
        decode_block(received, place, bits, incoming.row_bytes, workers, lost, start, start + size, False)
        encode_block(lost, residual, start, packets, size, bits, locate(outgoing, block, 1))


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
    part: PartLayout,
    blocks: Range,
) -> None:
    """See `bucket_reference.encode_packed_payload`; `state` is the momentum's packets, laid out as `whole`."""
    nothing = np.empty(0, dtype=np.float32)
    payload = np.empty(part.block_size, dtype=np.float32)
    for block in range(blocks.first, blocks.last):
        start = start_of(part, block)
        stop = start + part.block_size
        number = start // part.block_size
        run = first_run(runs, start)
        while run < runs.shape[0] and runs[run, FIRST] < stop:
            low, high = max(runs[run, FIRST], start), min(runs[run, END], stop)
            kind = runs[run, KIND]
            size = ELEMENT_BYTES[kind]
            address = runs[run, ADDRESS] + (low - runs[run, FIRST]) * size
            of_run = factors[run]
            momentum_payload(
                state,
                whole,
                Values(bytes_at(address, (high - low) * size), kind),
                Preconditioner(codes[low:high], tables[run]),
                payload[low - start : high - start],
                Factors(of_run[_BETA1], of_run[_GAIN], of_run[_DIVISOR]),
                low,
                False,
                Range(number, number + 1),
            )
            run += 1
        place = place_in_part(part, block, start)
        payload[place.valid :] = 0.0
        add_and_store(payload, residual.memory, residual.kind, start, payload)
        encode_block(payload, nothing, 0, packets, part.block_size, part.code_bits, place)
        store_rounded_block(payload, lost.memory, lost.kind, start)
