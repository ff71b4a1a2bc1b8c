"""Count the floating-point operations of a model's forward and time it, module by module, and tell it as text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle


class FlopsProfiler:
    """Profiles forwards of `model` between `start_profile()` and `stop_profile()`.

    Operations are those that torch.utils.flop_counter knows, matrix products, convolutions and attention: a
    multiplication with an addition is two. What kernels of others do, and what torch.compile has fused, is not seen.
    Counting makes operations slower by microseconds each, which are in the times.

    `flops`, `macs`, `params`: of the last profile, None before there is one. `recompute_fwd_factor`: the share of the
    forward that backward computes again, of use to reports of whole steps.
    """

    def __init__(self, model: nn.Module, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self.flops: int | None = None
        self.macs: int | None = None
        self.params: int | None = None
        self._counter: FlopCounterMode | None = None
        self._hooks: list[RemovableHandle] = []
        self._tallies: dict[nn.Module, _Tally] = {}
        self._ignored: tuple[type[nn.Module], ...] = ()

    def start_profile(self, ignore_list: Collection[type[nn.Module]] | None = None) -> None:
        """Count from zero, from now on. `ignore_list`: classes that get no line of their own, nor what is in them."""
        self.stop_profile()
        self._ignored = tuple(ignore_list or ())
        self._tallies = {}
        self._counter = counter = FlopCounterMode(display=False)
        # Its own tracker of modules leaves hooks in the graph, which backward would run into after the count has ended.
        counter.mod_tracker = _WholeModel()  # type: ignore[assignment]
        for _, module, _ in _modules(self.model, self._ignored):
            tally = self._tallies[module] = _Tally(counter)
            self._hooks.append(module.register_forward_pre_hook(tally.enter, prepend=True))
            self._hooks.append(module.register_forward_hook(tally.leave, always_call=True))
        counter.__enter__()  # type: ignore[no-untyped-call]
        self.started = True

    def stop_profile(self) -> None:
        """Stop counting; what was counted stays."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._counter = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.started:
            self._note_totals()

    def reset_profile(self) -> None:
        """Count from zero again."""
        for tally in self._tallies.values():
            tally.reset()

    def end_profile(self) -> None:
        """Stop, and forget what modules cost; `flops`, `macs` and `params` stay."""
        self.stop_profile()
        self._tallies = {}
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Operations of the forwards so far. Raises RuntimeError where no profile was started, as all of these do."""
        flops = self.module_costs()[0].flops
        return f"{_short_number(flops)}FLOPs" if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiplications with an addition."""
        macs = self.module_costs()[0].macs
        return f"{_short_number(macs)}MACs" if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds in the model's forward."""
        seconds = self.module_costs()[0].seconds
        return _short_seconds(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Elements of all parameters, those that are one tensor once."""
        params = self.module_costs()[0].params
        return _short_number(params).strip() if as_string else params

    def module_costs(self) -> list[ModuleCost]:
        """Every module, each before those inside of it; the model first."""
        if not self.started:
            raise RuntimeError("there is no profile: call start_profile(), and run the model, before end_profile()")
        costs = []
        for name, module, depth in _modules(self.model, self._ignored):
            params = sum(one.numel() for one in module.parameters())
            costs.append(ModuleCost(name, type(module).__name__, depth, params, *self._cost(module)))
        return costs

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
        step: StepCost | None = None,
    ) -> None:
        """Write the report to `output_file`, in a folder that is made, or print it.

        `step`: what else is known of the step it was measured in. Raises OSError where the file cannot be written.
        """
        self._note_totals()
        step = StepCost() if step is None else step
        costs = self.module_costs()
        lines = [f"profile of a step after {profile_step} steps, one rank"]
        lines += _step_lines(costs[0], step, 2 + self.recompute_fwd_factor)
        lines += ["", "modules by class", *_top_lines(costs, module_depth, top_modules)]
        if detailed:
            lines += ["", "all modules; operations and times are of the forward", *_detailed_table(costs)]
        text = "\n".join(lines) + "\n"
        if output_file:
            Path(output_file).absolute().parent.mkdir(parents=True, exist_ok=True)
            Path(output_file).write_text(text)
        else:
            print(text, end="", file=sys.stdout, flush=True)

    def _cost(self, module: nn.Module) -> tuple[int, float]:
        """(Operations, seconds): of a module that is never called itself, as a ModuleList is, those of its children."""
        tally = self._tallies.get(module)
        if tally is None:
            return 0, 0.0
        if tally.calls:
            return tally.flops, tally.seconds
        inside = [self._cost(child) for child in module.children()]
        return sum(flops for flops, _ in inside), sum(seconds for _, seconds in inside)

    def _note_totals(self) -> None:
        cost = self.module_costs()[0]
        self.flops, self.macs, self.params = cost.flops, cost.macs, cost.params


class _ReportOptions(TypedDict, total=False):
    module_depth: int
    top_modules: int
    detailed: bool
    output_file: str | None


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    *,
    warm_up: int = 1,
    as_string: bool = True,
    ignore_modules: Collection[type[nn.Module]] | None = None,
    mode: Literal["forward", "generate"] = "forward",
    **report: Unpack[_ReportOptions],
) -> tuple[int, int, int] | tuple[str, str, str]:
    """(floating-point operations, MACs, parameters) of one forward of `model`, or of its generate().

    It runs in evaluation mode, which it leaves the model in, on zeros of `input_shape`, in the dtype and on the device
    of the first parameter, or on `args` and `kwargs`; `warm_up` times before. `report`: `module_depth`, `top_modules`,
    `detailed` and `output_file`, as in `FlopsProfiler.print_model_profile`.

    Raises TypeError or ValueError for what cannot be profiled.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"get_model_profile() takes a torch.nn.Module, got {type(model).__name__}")
    if mode not in ("forward", "generate"):
        raise ValueError(f'mode must be "forward" or "generate", got {mode!r}')
    if input_shape is not None:
        if not isinstance(input_shape, tuple) or not input_shape:
            raise ValueError(f"input_shape must be a tuple of sizes, got {input_shape!r}")
        first = next(model.parameters(), torch.empty(0))
        args = [torch.zeros(input_shape, dtype=first.dtype, device=first.device)]
    elif not args and not kwargs:
        raise ValueError("give get_model_profile() an input_shape, or args and kwargs to call the model with")
    run: Callable[..., Any] = model if mode == "forward" else model.generate  # type: ignore[assignment]
    model.eval()
    profiler = FlopsProfiler(model)
    for _ in range(warm_up):
        run(*args, **(kwargs or {}))
    profiler.start_profile(ignore_modules)
    try:
        run(*args, **(kwargs or {}))
        profiler.stop_profile()
        sums = profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params
        totals: Any = tuple(total(as_string) for total in sums)
        if print_profile:
            profiler.print_model_profile(warm_up, **report)
    finally:
        profiler.end_profile()
    found: tuple[int, int, int] | tuple[str, str, str] = totals
    return found


class _Tally:
    """What forwards of one module have cost so far."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self._counter = counter
        self._entered: list[tuple[int, float]] = []
        self.reset()

    def reset(self) -> None:
        self.calls, self.flops, self.seconds = 0, 0, 0.0

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self._entered.append((self._counter.get_total_flops(), seconds_now()))

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.calls += 1
        flops, start = self._entered.pop()
        if not self._entered:  # a module inside of itself counts once
            self.flops += self._counter.get_total_flops() - flops
            self.seconds += seconds_now() - start


class _WholeModel(nullcontext[None]):
    """In the place of the counter's tracker of modules: everything belongs to one."""

    parents = frozenset({"Global"})


def _modules(model: nn.Module, ignored: tuple[type[nn.Module], ...]) -> list[tuple[str, nn.Module, int]]:
    """(name, module, depth) of `model` and what is inside, each once."""
    found = [("", model, 0)]
    left_out: tuple[str, ...] = ()
    for name, module in list(model.named_modules())[1:]:
        if isinstance(module, ignored) or name.startswith(left_out):
            left_out += (f"{name}.",)
        else:
            found.append((name, module, 1 + name.count(".")))
    return found


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
    was not timed."""

    forward: float | None = None
    backward: float | None = None
    step: float | None = None
    micro_batches: int = 1
    samples: int = 0


def _step_lines(model: ModuleCost, step: StepCost, factor: float) -> list[str]:
    """The model as a whole, and the step that it was measured in.

    `factor`: operations of the backward for one of the forward, as an estimate.
    """
    seconds = model.seconds if step.forward is None else step.forward
    lines = [
        f"parameters: {_short_number(model.params)}",
        f"forward: {_short_number(model.flops)}FLOPs, {_short_number(model.macs)}MACs, {_short_seconds(seconds)}, "
        f"{_speed(model.flops, seconds)}",
    ]
    if step.backward is not None:
        speed = _speed(factor * model.flops, step.backward)
        lines.append(f"backward: {_short_seconds(step.backward)}, {speed} at {factor:g} times the forward's operations")
    if step.step is not None:
        lines.append(f"moving the weights: {_short_seconds(step.step)}")
    if step.forward is not None and step.backward is not None and step.step is not None:
        # Were all micro-batches like the one that was timed.
        total = step.micro_batches * (step.forward + step.backward) + step.step
        flops = (1 + factor) * model.flops * step.micro_batches
        lines.append(
            f"step of {step.micro_batches} micro-batches: {_short_seconds(total)}, {_speed(flops, total)} a "
            f"rank, {step.samples / total:.1f} samples/s on all ranks"
        )
    return lines


def _top_lines(modules: Sequence[ModuleCost], module_depth: int, top_modules: int) -> list[str]:
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
            show = _short_seconds if what == "forward" else _short_number
            first = sorted(sums.items(), key=lambda item: -item[1][index])[:top_modules]
            lines.append(
                f"  {what:<10}  " + ", ".join(f"{kind} {show(total[index])}".rstrip() for kind, total in first)
            )
    return lines


def _detailed_table(modules: Sequence[ModuleCost]) -> list[str]:
    """A line for each module, indented as they are nested: its share of parameters, MACs and time."""
    whole = modules[0]

    def share(value: float, of_all: float) -> str:
        return f"{100 * value / of_all:.1f}" if of_all else ""

    rows = [("module", "parameters", "%", "MACs", "%", "forward", "%", "FLOP/s")]
    for one in modules:
        label = "  " * one.depth + (f"{one.name.rpartition('.')[2]}: " if one.name else "") + one.kind
        params = _short_number(one.params), share(one.params, whole.params)
        macs = _short_number(one.macs), share(one.macs, whole.macs)
        seconds = _short_seconds(one.seconds), share(one.seconds, whole.seconds)
        rows.append((label, *params, *macs, *seconds, _speed(one.flops, one.seconds)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.strip().rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _short_number(value: float) -> str:
    """1234567 as `1.23 M`; a small one as `12 `, so that a unit can follow."""
    for size, prefix in _PREFIXES:
        if value >= size:
            return f"{value / size:.2f}{prefix}"
    return f"{value:.4g} "


def _short_seconds(seconds: float) -> str:
    """`1.23 s`, `4.56 ms` or `7.89 us`."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-6:.2f} us"


def _speed(flops: float, seconds: float) -> str:
    return f"{_short_number(flops / seconds if seconds else 0.0)}FLOP/s"


def seconds_now() -> float:
    """Seconds on the host's clock, once the GPU, where one is in use, has done what it was asked for."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()
