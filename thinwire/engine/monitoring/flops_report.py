"""What a model's forward costs, module by module, as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["ModuleCost", "StepCost", "detailed_table", "short_number", "short_seconds", "step_lines", "top_lines"]

_PREFIXES = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " K"))


@dataclass(frozen=True)
class ModuleCost:
    """One module of a model: `name` as in named_modules, "" for the model itself, at `depth` 0.

    `params`: elements of its parameters and its submodules'. `flops`: of what ran inside of it, two for a
    multiplication with an addition. `seconds`: in its forward.
    """

    name: str
    kind: str
    depth: int
    params: int
    flops: int
    seconds: float

    @property
    def macs(self) -> int:
        """Multiplications with an addition."""
        return self.flops // 2


@dataclass(frozen=True)
class StepCost:
    """A step of one rank: seconds in the forward and backward of a micro-batch and in moving the weights; None for what
    was not timed. `backward_factor`: operations of the backward for one of the forward, as an estimate."""

    forward: float | None
    backward: float | None
    step: float | None
    micro_batches: int
    samples: int
    backward_factor: float

    @property
    def total(self) -> float | None:
        """Seconds of the whole step, were all micro-batches like the one that was timed."""
        if self.forward is None or self.backward is None or self.step is None:
            return None
        return self.micro_batches * (self.forward + self.backward) + self.step


def step_lines(model: ModuleCost, step: StepCost) -> list[str]:
    """The model as a whole, and the step that it was measured in."""
    lines = _model_lines(model, step.forward)
    if step.backward is not None:
        flops = step.backward_factor * model.flops
        lines.append(f"backward: {short_seconds(step.backward)}, {_speed(flops, step.backward)}")
        lines[-1] += f" at {step.backward_factor:g} times the forward's operations"
    if step.step is not None:
        lines.append(f"moving the weights: {short_seconds(step.step)}")
    if step.total is not None:
        flops = (1 + step.backward_factor) * model.flops * step.micro_batches
        lines.append(
            f"step of {step.micro_batches} micro-batches: {short_seconds(step.total)}, {_speed(flops, step.total)} a "
            f"rank, {step.samples / step.total:.1f} samples/s on all ranks"
        )
    return lines


def _model_lines(model: ModuleCost, forward: float | None) -> list[str]:
    seconds = model.seconds if forward is None else forward
    return [
        f"parameters: {short_number(model.params)}",
        f"forward: {short_number(model.flops)}FLOPs, {short_number(model.macs)}MACs, {short_seconds(seconds)}, "
        f"{_speed(model.flops, seconds)}",
    ]


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
    rows = [("module", "parameters", "%", "MACs", "%", "forward", "%", "FLOP/s")]
    for one in modules:
        label = "  " * one.depth + (f"{one.name.rpartition('.')[2]}: " if one.name else "") + one.kind
        rows.append(
            (
                label,
                short_number(one.params),
                _share(one.params, whole.params),
                short_number(one.macs),
                _share(one.macs, whole.macs),
                short_seconds(one.seconds),
                _share(one.seconds, whole.seconds),
                _speed(one.flops, one.seconds),
            )
        )
    return list(_aligned(rows))


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


def _share(value: float, whole: float) -> str:
    return f"{100 * value / whole:.1f}" if whole else ""


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(
            cell.strip().rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
