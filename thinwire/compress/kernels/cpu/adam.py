"""The loop of the CPU backend over a step of Adam, sixteen elements at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from thinwire.compress.kernels.cpu.blocks import END, FIRST, Range, Table, first_run
from thinwire.simd import floats, memory
from thinwire.simd.building import LANES
from thinwire.simd.compiling import inner, kernel

GRADIENT = END + 1
_MOMENTUM, _VARIANCE, _OUTPUT, COLUMNS = range(GRADIENT + 1, GRADIENT + 5)


class Factors(NamedTuple):
    """`weight`: of g - m in what is added to m, or to g where gain is a half or more. `rate`: its negative."""

    weight: np.float32
    beta2: np.float32
    square_gain: np.float32
    correction: np.float32
    eps: np.float32
    decay: np.float32
    rate: np.float32


class StepForm(NamedTuple):
    """Which parts of a step there are, and which way they are done."""

    tracks: bool
    tracks_momentum: bool
    from_momentum: bool
    moves: bool
    divides: bool
    eps_inside_root: bool
    holds_zero: bool


@kernel
def adam_step(runs: Table, factors: Factors, form: StepForm, elements: Range) -> None:
    """Execute `plain_adam_step`. `runs`: the elements of each tensor, counted over all, and addresses: gradient,
    momentum, variance, and the weight or denominator."""
    run = first_run(runs, elements.first)
    while run < runs.shape[0] and runs[run, FIRST] < elements.last:
        begin = runs[run, FIRST]
        low, high = max(begin, elements.first), min(runs[run, END], elements.last)
        offset = 4 * (low - begin)
        gradient, momentum = runs[run, GRADIENT] + offset, runs[run, _MOMENTUM] + offset
        variance, output = runs[run, _VARIANCE] + offset, runs[run, _OUTPUT] + offset
        behind = (high - low) // LANES * LANES
        for at in range(0, 4 * behind, 4 * LANES):
            _step(gradient + at, momentum + at, variance + at, output + at, LANES, factors, form)
        if behind < high - low:
            at, count = 4 * behind, high - low - behind
            _step(gradient + at, momentum + at, variance + at, output + at, count, factors, form)
        run += 1


@inner
def _step(
    gradient: int, momentum: int, variance: int, output: int, count: int, factors: Factors, form: StepForm
) -> None:
    """The first `count` of the sixteen elements at these addresses: where that is sixteen, no code asks for it."""
    v = memory.load_some_floats(variance, count)
    m = v
    if form.tracks:
        g = memory.load_some_floats(gradient, count)
        v = _tracked_variance(g, v, factors)
        memory.store_some_floats(variance, v, count)
        if form.tracks_momentum:
            m = _tracked_momentum(g, memory.load_some_floats(momentum, count), factors, form)
            memory.store_some_floats(momentum, m, count)
    if form.moves:
        w = memory.load_some_floats(output, count)
        memory.store_some_floats(output, _moved(w, m, _denominator(v, factors, form), factors), count)
    elif form.divides:
        memory.store_some_floats(output, _denominator(v, factors, form), count)


@inner
def _tracked_momentum(
    gradient: floats.Vector, momentum: floats.Vector, factors: Factors, form: StepForm
) -> floats.Vector:
    change = floats.multiply(floats.broadcast(factors.weight), floats.subtract(gradient, momentum))
    return floats.add(momentum if form.from_momentum else gradient, change)


@inner
def _tracked_variance(gradient: floats.Vector, variance: floats.Vector, factors: Factors) -> floats.Vector:
    square = floats.multiply(floats.multiply(floats.broadcast(factors.square_gain), gradient), gradient)
    return floats.add(floats.multiply(variance, floats.broadcast(factors.beta2)), square)


@inner
def _denominator(variance: floats.Vector, factors: Factors, form: StepForm) -> floats.Vector:
    correction, eps = floats.broadcast(factors.correction), floats.broadcast(factors.eps)
    if form.eps_inside_root:
        found = floats.square_root(floats.add(floats.divide(variance, correction), eps))
    else:
        found = floats.add(floats.divide(floats.square_root(variance), correction), eps)
    if form.holds_zero:
        zero = floats.equal(variance, floats.broadcast(np.float32(0.0)))
        found = floats.select(zero, floats.broadcast(np.float32(np.inf)), found)
    return found


@inner
def _moved(
    weight: floats.Vector, momentum: floats.Vector, denominator: floats.Vector, factors: Factors
) -> floats.Vector:
    update = floats.divide(floats.multiply(floats.broadcast(factors.rate), momentum), denominator)
    return floats.add(floats.multiply(weight, floats.broadcast(factors.decay)), update)
