"""The loops of the CPU backend that decode what came back and move a bucket's weights by it, block by block: what was
decoded is in the first-level cache while weights move."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.compress.kernels.cpu.blocks import Bytes, Floats, Layout, Range
from thinwire.compress.kernels.cpu.decode import decode_block
from thinwire.compress.kernels.cpu.halves import ELEMENT_BYTES, NO_VALUES, Values, store_nearest
from thinwire.compress.kernels.cpu.momentum import Step, apply_signs
from thinwire.compress.kernels.cpu.payload import DIVIDED
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

__all__ = ["decode_and_move", "move_packed"]

_REPLICA, _REPLICA_KIND = KIND + 1, KIND + 2
_RATE, _DECAY = range(2)


@kernel
def decode_and_move(
    runs: Table,
    factors: NDArray[np.float32],
    form: int,
    holds: bool,
    packets: Bytes,
    output: Floats,
    denominators: Floats,
    part: PartLayout,
    blocks: Range,
) -> None:
    """See `bucket_reference.decode_and_move`. `runs`: weights, and then replicas. `factors`: -rate and decay."""
    for block in range(blocks.first, blocks.last):
        start = start_of(part, block)
        stop = start + part.block_size
        place = place_in_part(part, block, start)
        decode_block(packets, place, part.code_bits, part.row_bytes, 1, output, start, stop, False)
        output[start + place.valid : stop] = 0.0
        if holds:
            _hold(output, denominators, start, stop)
        run = first_run(runs, start)
        while run < runs.shape[0] and runs[run, FIRST] < stop:
            low, high = max(runs[run, FIRST], start), min(runs[run, END], stop)
            if runs[run, KIND] != NO_VALUES:
                offset = low - runs[run, FIRST]
                weights = bytes_at(runs[run, ADDRESS] + 4 * offset, 4 * (high - low))
                kind = runs[run, _REPLICA_KIND]
                size = ELEMENT_BYTES[kind]
                replica = Values(bytes_at(runs[run, _REPLICA] + size * offset, size * (high - low)), kind)
                _move(weights, replica, factors[run], form, output, denominators, low, high)
            run += 1


@helper
def _hold(output: Floats, denominators: Floats, start: int, stop: int) -> None:
    """Zero what was decoded where a denominator is infinite."""
    infinity, zero = floats.broadcast(np.float32(np.inf)), floats.broadcast(np.float32(0.0))
    for at in range(start, stop, LANES):
        infinite = floats.equal(floats.absolute(floats.load(denominators, at)), infinity)
        floats.store(output, at, floats.select(infinite, zero, floats.load(output, at)))


@helper
def _move(
    weights: Bytes,
    replica: Values,
    factors: Floats,
    form: int,
    output: Floats,
    denominators: Floats,
    low: int,
    high: int,
) -> None:
    """Move what belongs to elements low to high of the bucket."""
    rate, decay = floats.broadcast(factors[_RATE]), floats.broadcast(factors[_DECAY])
    behind = (high - low) // LANES * LANES
    for i in range(0, behind, LANES):
        _move_lanes(weights, replica.memory, replica.kind, i, rate, decay, form, output, denominators, low + i)
    count = high - low - behind
    if count:
        size = ELEMENT_BYTES[replica.kind]
        some, some_replica = np.zeros(4 * LANES, np.uint8), np.zeros(4 * LANES, np.uint8)
        some_output, some_denominators = np.zeros(LANES, np.float32), np.ones(LANES, np.float32)
        some[: 4 * count] = weights[4 * behind : 4 * (behind + count)]
        some_output[:count] = output[low + behind : high]
        if denominators.size:
            some_denominators[:count] = denominators[low + behind : high]
        _move_lanes(some, some_replica, replica.kind, 0, rate, decay, form, some_output, some_denominators, 0)
        weights[4 * behind : 4 * (behind + count)] = some[: 4 * count]
        replica.memory[size * behind : size * (behind + count)] = some_replica[: size * count]


@helper
def _move_lanes(
    weights: Bytes,
    replica: Bytes,
    kind: int,
    of_run: int,
    rate: floats.Vector,
    decay: floats.Vector,
    form: int,
    output: Floats,
    denominators: Floats,
    at: int,
) -> None:
    """Sixteen elements, from number `of_run` of the weights on, and `at` of the bucket."""
    value = floats.multiply(floats.load(weights, 4 * of_run), decay)
    u = floats.load(output, at)
    if form == DIVIDED:
        moved = floats.add(value, floats.divide(floats.multiply(rate, u), floats.load(denominators, at)))
    else:
        moved = floats.multiply_add(u, rate, value)
    floats.store(weights, 4 * of_run, moved)
    if kind != NO_VALUES:
        store_nearest(replica, of_run, kind, moved)


@kernel
def move_packed(
    runs: Table,
    factors: NDArray[np.float32],
    state: Bytes,
    whole: Layout,
    codes: Bytes,
    weights: Values,
    first: int,
    first_key: np.uint32,
    second_key: np.uint32,
    blocks: Range,
) -> None:
    """See `bucket_reference.move_packed`. A run's address says no more than whether it moves; `factors`: rate and
    decay."""
    begin, size = blocks.first * whole.block_size, ELEMENT_BYTES[weights.kind]
    stop = min(blocks.last * whole.block_size, first + weights.memory.size // size)
    begin = max(begin, first)
    run = first_run(runs, begin)
    while run < runs.shape[0] and runs[run, FIRST] < stop:
        low, high = max(runs[run, FIRST], begin), min(runs[run, END], stop)
        if runs[run, ADDRESS] and low < high:
            memory = weights.memory[(low - first) * size : (high - first) * size]
            step = Step(factors[run, _RATE], factors[run, _DECAY], first_key, second_key)
            covered = Range(low // whole.block_size, (high - 1) // whole.block_size + 1)
            apply_signs(state, whole, Values(memory, weights.kind), codes[low:high], step, low, covered)
        run += 1
