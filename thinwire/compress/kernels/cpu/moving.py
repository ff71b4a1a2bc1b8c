"""The loops of the CPU backend that decode what came back and move a bucket's weights by it, block by block: what was
decoded is in the first-level cache while weights move."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.compress.kernels.cpu.blocks import (
    ADDRESS,
    END,
    FIRST,
    KIND,
    Bytes,
    Floats,
    Layout,
    PartLayout,
    Range,
    Table,
    first_run,
    place_in_part,
    start_of,
)
from thinwire.compress.kernels.cpu.decode import decode_block
from thinwire.compress.kernels.cpu.momentum import Step, apply_signs
from thinwire.compress.kernels.cpu.payload import DIVIDED
from thinwire.compress.kernels.cpu.small_floats import ELEMENT_BYTES, NO_VALUES, Values, nearest_bits
from thinwire.simd import floats, memory
from thinwire.simd.compiling import helper, inner, kernel
from thinwire.simd.floats import LANES

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
    denominators: int,
    part: PartLayout,
    blocks: Range,
) -> None:
    """See `bucket_reference.decode_and_move`. `runs`: weights, and then replicas. `factors`: -rate and decay.
    `denominators`: their address."""
    output_at = output.ctypes.data
    for block in range(blocks.first, blocks.last):
        start = start_of(part, block)
        stop = start + part.block_size
        place = place_in_part(part, block, start)
        decode_block(packets, place, part.form.codec, part.row_bytes, 1, output, start, stop, False)
        output[start + place.valid : stop] = 0.0
        if holds:
            _hold(output_at, denominators, start, stop)
        run = first_run(runs, start)
        while run < runs.shape[0] and runs[run, FIRST] < stop:
            low, high = max(runs[run, FIRST], start), min(runs[run, END], stop)
            if runs[run, KIND] != NO_VALUES:
                offset, kind = low - runs[run, FIRST], runs[run, _REPLICA_KIND]
                weights, replica = runs[run, ADDRESS] + 4 * offset, runs[run, _REPLICA] + ELEMENT_BYTES[kind] * offset
                moves = _Move(factors[run, _RATE], factors[run, _DECAY], form == DIVIDED)
                _move(weights, replica, kind, moves, output_at + 4 * low, denominators + 4 * low, high - low)
            run += 1


class _Move(NamedTuple):
    """What moves a run: the rate's negative, decay, and whether u is divided first."""

    rate: np.float32
    decay: np.float32
    divides: bool


@helper
def _hold(output: int, denominators: int, start: int, stop: int) -> None:
    """Zero what was decoded where a denominator is infinite."""
    infinity, zero = floats.broadcast(np.float32(np.inf)), floats.broadcast(np.float32(0.0))
    for at in range(4 * start, 4 * stop, 4 * LANES):
        infinite = floats.equal(floats.absolute(memory.load_floats(denominators + at)), infinity)
        memory.store_floats(output + at, floats.select(infinite, zero, memory.load_floats(output + at)))


@helper
def _move(weights: int, replica: int, kind: int, moves: _Move, u: int, denominators: int, numel: int) -> None:
    """Move `numel` weights; all but numbers are addresses."""
    one = floats.broadcast(np.float32(1.0))
    behind = numel // LANES * LANES
    for at in range(0, 4 * behind, 4 * LANES):
        denominator = memory.load_floats(denominators + at) if moves.divides else one
        moved = _moved(memory.load_floats(weights + at), memory.load_floats(u + at), denominator, moves)
        memory.store_floats(weights + at, moved)
        if kind != NO_VALUES:
            memory.store_shorts(replica + at // 2, nearest_bits(moved, kind))
    count = numel - behind
    if count:
        at = 4 * behind
        denominator = memory.load_some_floats(denominators + at, count) if moves.divides else one
        value, step = memory.load_some_floats(weights + at, count), memory.load_some_floats(u + at, count)
        moved = _moved(value, step, denominator, moves)
        memory.store_some_floats(weights + at, moved, count)
        if kind != NO_VALUES:
            memory.store_some_shorts(replica + at // 2, nearest_bits(moved, kind), count)


@inner
def _moved(weights: floats.Vector, u: floats.Vector, denominators: floats.Vector, moves: _Move) -> floats.Vector:
    """Sixteen weights."""
    decayed, rate = floats.multiply(weights, floats.broadcast(moves.decay)), floats.broadcast(moves.rate)
    if moves.divides:
        moved = floats.add(decayed, floats.divide(floats.multiply(rate, u), denominators))
    else:
        moved = floats.multiply_add(u, rate, decayed)
    return moved


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
