"""Text of a profile of operations: modules, classes of them, and the step that it was measured in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ModuleCost:
    """One module of a model: `name` as in named_modules, "" for the model itself, at `depth` 0.

    `params`: elements of its parameters and its submodules'. `flops`: of what ran inside of it. `macs`: multiplications
    with an addition, each two of them. `seconds`: in its forward.
    """

    name: str
    kind: str
    depth: int
    params: int
    flops: int
    macs: int
    seconds: float


@dataclass(frozen=True)
class StepCost:
    """A step of one rank: seconds in the forward and backward of a micro-batch and in moving the weights; None for what
    was not timed."""

    forward: float | None = None
    backward: float | None = None
    step: float | None = None
    micro_batches: int = 1
    samples: int = 0


def step_lines(model: ModuleCost, step: StepCost, factor: float) -> list[str]:
    """The model as a whole, and the step that it was measured in.

    `factor`: operations of the backward for one of the forward, as an estimate.
    """
    seconds = model.seconds if step.forward is None else step.forward
    lines = [
        f"parameters: {short_number(model.params)}",
        f"forward: {short_number(model.flops)}FLOPs, {short_number(model.macs)}MACs, {short_seconds(seconds)}, "
        f"{_speed(model.flops, seconds)}",
    ]
    if step.backward is not None:
        speed = _speed(factor * model.flops, step.backward)
        lines.append(f"backward: {short_seconds(step.backward)}, {speed} at {factor:g} times the forward's operations")
    if step.step is not None:
        lines.append(f"moving the weights: {short_seconds(step.step)}")
    if step.forward is not None and step.backward is not None and step.step is not None:
        # Were all micro-batches like the one that was timed.
        total = step.micro_batches * (step.forward + step.backward) + step.step
        flops = (1 + factor) * model.flops * step.micro_batches
        lines.append(
            f"step of {step.micro_batches} micro-batches: {short_seconds(total)}, {_speed(flops, total)} a "
            f"rank, {step.samples / total:.1f} samples/s on all ranks"
        )
    return lines


def top_lines(modules: Sequence[ModuleCost], module_depth: int, top_modules: int) -> list[str]:
    """For each depth down to `module_depth` (-1: all) the `top_modules` classes with most parameters, MACs and time."""
    deepest = max(one.depth for one in modules)
    lines = []
    for depth in range(1 + (deepest if module_depth < 0 else min(module_depth, deepest))):
        sums: dict[str, list[float]] = {}
        for one in modules:
            if one.depth == depth:
                total = sums.setdefault(one.kind, [0.0, 0.0, 0.0])
                for index, value in enumerate((one.params, one.macs, one.seconds)):
                    total[index] += value
        lines.append(f"depth {depth}")
        for index, what in enumerate(("parameters", "MACs", "forward")):
            show = short_seconds if what == "forward" else short_number
            first = sorted(sums.items(), key=lambda item: -item[1][index])[:top_modules]
            lines.append(
                f"  {what:<10}  " + ", ".join(f"{kind} {show(total[index])}".rstrip() for kind, total in first)
            )
    return lines


def detailed_table(modules: Sequence[ModuleCost]) -> list[str]:
    """A line for each module, indented as they are nested: its share of parameters, MACs and time."""
    whole = modules[0]

    def share(value: float, of_all: float) -> str:
        return f"{100 * value / of_all:.1f}" if of_all else ""

    rows = [("module", "parameters", "%", "MACs", "%", "forward", "%", "FLOP/s")]
    for one in modules:
        label = "  " * one.depth + (f"{one.name.rpartition('.')[2]}: " if one.name else "") + one.kind
        params = short_number(one.params), share(one.params, whole.params)
        macs = short_number(one.macs), share(one.macs, whole.macs)
        seconds = short_seconds(one.seconds), share(one.seconds, whole.seconds)
        rows.append((label, *params, *macs, *seconds, _speed(one.flops, one.seconds)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.strip().rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


_PREFIXES = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " K"))


def short_number(value: float) -> str:
    """1234567 as `1.23 M`; a small one as `12 `, so that a unit can follow."""
    for size, prefix in _PREFIXES:
        if value >= size:
            return f"{value / size:.2f}{prefix}"
    return f"{value:.4g} "


def short_seconds(seconds: float) -> str:
    """`1.23 s`, `4.56 ms` or `7.89 us`."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-6:.2f} us"


def _speed(flops: float, seconds: float) -> str:
    return f"{short_number(flops / seconds if seconds else 0.0)}FLOP/s"
