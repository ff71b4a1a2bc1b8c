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
    Range,
    Table,
    first_run,
    place_in_part,
    start_of,
)
from thinwire.compress.kernels.cpu.decode import decode_block
from thinwire.compress.kernels.cpu.payload import DIVIDED
from thinwire.compress.kernels.cpu.small_floats import (
    ELEMENT_BYTES,
    NO_VALUES,
    Values,
    nearest_bits,
    random_bits,
    round_and_store,
    some_of,
    widen,
)
from thinwire.simd import floats, integers, memory
from thinwire.simd.building import LANES
from thinwire.simd.compiling import helper, inner, kernel

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
    part: Layout,
    blocks: Range,
) -> None:
    """Execute `bucket_reference.decode_and_move`. `runs`: weights, and then replicas. `factors`: -rate and decay.
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
    """Execute `bucket_reference.move_packed`. A run's address says no more than whether it moves; `factors`: rate and
    decay."""
    begin, size = blocks.first * whole.block_size, ELEMENT_BYTES[weights.kind]
    stop = min(blocks.last * whole.block_size, first + weights.memory.size // size)
    begin = max(begin, first)
    run = first_run(runs, begin)
    while run < runs.shape[0] and runs[run, FIRST] < stop:
        low, high = max(runs[run, FIRST], begin), min(runs[run, END], stop)
        if runs[run, ADDRESS] and low < high:
            memory = weights.memory[(low - first) * size : (high - first) * size]
            step = _Step(factors[run, _RATE], factors[run, _DECAY], first_key, second_key)
            covered = Range(low // whole.block_size, (high - 1) // whole.block_size + 1)
            _apply_signs(state, whole, Values(memory, weights.kind), codes[low:high], step, low, covered)
        run += 1


class _Step(NamedTuple):
    """The size of the step, the factor of the weights, and the two keys of their rounding's seed."""

    lr: np.float32
    decay: np.float32
    first_key: np.uint32
    second_key: np.uint32


@helper
def _apply_signs(
    packets: Bytes, layout: Layout, weights: Values, codes: Bytes, step: _Step, first: int, blocks: Range
) -> None:
    """Elements first, first + 1, ... as far as they lie in the given blocks; u is 0 where the code is."""
    values, kind = weights
    size = ELEMENT_BYTES[kind]
    for block in range(blocks.first, blocks.last):
        place = place_in_part(layout, block, block * layout.block_size)
        magnitude = floats.load_scalar(packets, place.scale_at) * step.lr
        start = block * layout.block_size - first  # where the block begins in the arrays
        begin, end, whole, behind, parts = _groups(start, layout.block_size, codes.size)
        for i in range(whole, behind, LANES):
            signs = floats.load_bits(packets, place.codes + i // 8)
            random = random_bits(first + start + i, step.first_key, step.second_key)
            _step(values, kind, codes, start + i, signs, magnitude, step.decay, random)
        for i in parts:
            at, low, high = start + i, max(begin - i, 0), min(end - i, LANES)
            if 0 < high - low < LANES:
                signs = floats.load_bits(packets, place.codes + i // 8)
                some, some_codes = some_of(values, at, low, high, size), some_of(codes, at, low, high, 1)
                random = random_bits(first + at, step.first_key, step.second_key)
                _step(some, kind, some_codes, 0, signs, magnitude, step.decay, random)
                values[(at + low) * size : (at + high) * size] = some[low * size : high * size]


@helper
def _groups(start: int, block_size: int, numel: int) -> tuple[int, int, int, int, range]:
    """Places in a block that begins at index `start`: begin and end of what lies among `numel` elements; begin and end
    of the groups of sixteen that all do; and where groups may begin of which a part does."""
    begin, end = max(-start, 0), min(numel - start, block_size)
    head, behind = begin // LANES * LANES, end // LANES * LANES
    whole = (begin + LANES - 1) // LANES * LANES
    parts = range(head, behind + 1, max(behind - head, 1)) if (begin | end) % LANES else range(0, 0, 1)
    return begin, end, whole, behind, parts


@helper
def _step(
    weights: Bytes,
    kind: int,
    codes: Bytes,
    at: int,
    signs: floats.Scalar,
    magnitude: np.float32,
    decay: np.float32,
    random: integers.Integers,
) -> None:
    """Sixteen elements from index `at` of the arrays on."""
    moved = _signed(signs, _moving(codes, at), magnitude)
    value = floats.multiply(widen(weights, at, kind), floats.broadcast(decay))
    round_and_store(weights, at, kind, floats.subtract(value, moved), random)


@helper
def _moving(codes: Bytes, at: int) -> floats.Scalar:
    """Bit k is set where code at + k is not 0."""
    zero = integers.broadcast(np.uint32(0))
    return integers.below(zero, integers.load_8_bits(codes, at))


@helper
def _signed(signs: floats.Scalar, moving: floats.Scalar, magnitude: np.float32) -> floats.Vector:
    """± magnitude, and 0 where nothing moves."""
    value = floats.select(signs, floats.broadcast(magnitude), floats.broadcast(-magnitude))
    return floats.select(moving, value, floats.broadcast(np.float32(0.0)))
