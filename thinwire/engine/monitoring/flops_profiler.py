"""Count the floating-point operations of a model's forward and time it, module by module; and of one step of a
training, while the engine times its parts anyway."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from thinwire.comm import Communicator
from thinwire.comm.agreement import on_every_rank
from thinwire.engine.config.models import EngineConfig
from thinwire.engine.monitoring.flops_report import (
    ModuleCost,
    StepCost,
    detailed_table,
    short_number,
    short_seconds,
    step_lines,
    top_lines,
)
from thinwire.engine.monitoring.timers import StepReport, StepTimers, seconds_now

__all__ = ["FlopsProfiler", "ProfiledTimers", "get_model_profile"]


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
        flops = self._model_cost().flops
        return f"{short_number(flops)}FLOPs" if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiplications with an addition."""
        macs = self._model_cost().macs
        return f"{short_number(macs)}MACs" if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds in the model's forward."""
        seconds = self._model_cost().seconds
        return short_seconds(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Elements of all parameters, those that are one tensor once."""
        params = self._model_cost().params
        return short_number(params).strip() if as_string else params

    def module_costs(self) -> list[ModuleCost]:
        """Every module, each before those inside of it; the model first."""
        if not self.started:
            raise RuntimeError("there is no profile: call start_profile(), and run the model, before end_profile()")
        return [
            ModuleCost(name, type(module).__name__, depth, _elements(module), *self._cost(module))
            for name, module, depth in _modules(self.model, self._ignored)
        ]

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
        factor = 2 + self.recompute_fwd_factor
        step = StepCost(None, None, None, 1, 0, factor) if step is None else step
        costs = self.module_costs()
        lines = [f"profile of a step after {profile_step} steps, one rank", *step_lines(costs[0], step)]
        lines += ["", "modules by class", *top_lines(costs, module_depth, top_modules)]
        if detailed:
            lines += ["", "all modules; operations and times are of the forward", *detailed_table(costs)]
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

    def _model_cost(self) -> ModuleCost:
        return self.module_costs()[0]

    def _note_totals(self) -> None:
        cost = self._model_cost()
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
        args = [_zeros(model, input_shape)]
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
        if print_profile:
            profiler.print_model_profile(warm_up, **report)
    finally:
        profiler.end_profile()
    flops, macs, params = profiler.flops, profiler.macs, profiler.params
    assert flops is not None
    assert macs is not None
    assert params is not None
    if as_string:
        return f"{short_number(flops)}FLOPs", f"{short_number(macs)}MACs", short_number(params).strip()
    return flops, macs, params


@dataclass(eq=False)
class _Tally:
    """What forwards of one module have cost so far."""

    counter: FlopCounterMode

    def __post_init__(self) -> None:
        self._entered: list[tuple[int, float]] = []
        self.reset()

    def reset(self) -> None:
        self.calls, self.flops, self.seconds = 0, 0, 0.0

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self._entered.append((self.counter.get_total_flops(), seconds_now()))

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.calls += 1
        flops, start = self._entered.pop()
        if not self._entered:  # a module inside of itself counts once
            self.flops += self.counter.get_total_flops() - flops
            self.seconds += seconds_now() - start


class _WholeModel:
    """In the place of the counter's tracker of modules: everything belongs to one."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        return

    def __exit__(self, *raised: object) -> None:
        return


def _modules(model: nn.Module, ignored: tuple[type[nn.Module], ...]) -> list[tuple[str, nn.Module, int]]:
    """(name, module, depth) of `model` and what is inside, each once."""
    seen: dict[nn.Module, tuple[str, nn.Module, int]] = {}

    def walk(one: nn.Module, name: str, depth: int) -> None:
        if one in seen or (depth and isinstance(one, ignored)):
            return
        seen[one] = (name, one, depth)
        for key, child in one.named_children():
            walk(child, f"{name}.{key}" if name else key, depth + 1)

    walk(model, "", 0)
    return list(seen.values())


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _zeros(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(shape, tuple) or not shape:
        raise ValueError(f"input_shape must be a tuple of sizes, got {shape!r}")
    first = next(model.parameters(), None)
    if first is None:
        return torch.zeros(shape)
    return torch.zeros(shape, dtype=first.dtype, device=first.device)


class ProfiledTimers:
    """`timers`, and on rank 0 a profile of the step after `flops_profiler.profile_step` steps.

    The last micro-batch's forward is counted. `profiler` keeps its totals. Construction is collective, and raises, on
    every rank, OSError (ValueError on the others) where the report's file cannot be written.
    """

    def __init__(self, timers: StepTimers, model: nn.Module, config: EngineConfig, comm: Communicator) -> None:
        section = config.flops_profiler
        self.profiler = FlopsProfiler(model, recompute_fwd_factor=section.recompute_fwd_factor)
        self._timers = timers
        self._config = config
        self._writes = comm.rank == 0
        self._steps = 0
        self._spans: dict[str, float] = {}
        if section.output_file:
            file = Path(section.output_file)
            action = (lambda: _touch(file)) if self._writes else lambda: None
            on_every_rank(comm, action, "write its profile", (OSError,))

    def resume(self, steps: int) -> None:
        """Go on after `steps` steps."""
        self._steps = steps

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what is inside as a part of this step."""
        if not self._writes or self._steps != self._config.flops_profiler.profile_step:
            with self._timers(name):
                yield
            return
        with self._timers(name):
            start = seconds_now()
            if name == "forward":
                self.profiler.start_profile()
            try:
                yield
            finally:
                if name == "forward":
                    self.profiler.stop_profile()
            self._spans[name] = seconds_now() - start

    def end_step(self, samples: int) -> None:
        """End a step in which all ranks together took `samples` samples; report it where it was to be profiled."""
        self._timers.end_step(samples)
        if self.profiler.started:
            self._report(samples)
            self.profiler.end_profile()
        self._spans.clear()
        self._steps += 1

    def report(self) -> StepReport:
        """What was measured since the last report."""
        return self._timers.report()

    def _report(self, samples: int) -> None:
        section, spans = self._config.flops_profiler, self._spans
        micro_batches = self._config.gradient_accumulation_steps
        factor = 2 + section.recompute_fwd_factor
        cost = StepCost(spans.get("forward"), spans.get("backward"), spans.get("step"), micro_batches, samples, factor)
        try:
            self.profiler.print_model_profile(
                self._steps, section.module_depth, section.top_modules, section.detailed, section.output_file, cost
            )
        except OSError as error:
            warnings.warn(f"the profile could not be written, training goes on: {error}", RuntimeWarning, stacklevel=3)


def _touch(file: Path) -> None:
    file.absolute().parent.mkdir(parents=True, exist_ok=True)
    file.open("a").close()
