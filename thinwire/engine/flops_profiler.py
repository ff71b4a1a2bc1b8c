"""Count the floating-point operations of a model's forward and time it, module by module, and tell it as text."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count, sdpa_flop_count
from torch.utils.hooks import RemovableHandle

from thinwire.engine.flops_report import (
    ModuleCost,
    StepCost,
    detailed_table,
    short_number,
    short_seconds,
    step_lines,
    top_lines,
)


class FlopsProfiler:
    """Profiles forwards of `model` between `start_profile()` and `stop_profile()`.

    Operations are those of matrix products, convolutions and attention: a multiplication with an addition is two. With
    `counts_sums` those of biases, elementwise arithmetic, activations and norms count too, which are no MACs. What
    kernels of others do, and what torch.compile has fused, is not seen. Counting makes operations slower by
    microseconds each, which are in the times.

    `flops`, `macs`, `params`: of the last profile, None before there is one. `recompute_fwd_factor`: the share of the
    forward that backward computes again, of use to reports of whole steps.
    """

    def __init__(self, model: nn.Module, recompute_fwd_factor: float = 0.0, counts_sums: bool = False) -> None:
        self.model, self.counts_sums = model, counts_sums
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self.flops: int | None = None
        self.macs: int | None = None
        self.params: int | None = None
        self._counter: _Counter | None = None
        self._hooks: list[RemovableHandle] = []
        self._tallies: dict[nn.Module, _Tally] = {}
        self._ignored: tuple[type[nn.Module], ...] = ()

    def start_profile(self, ignore_list: Collection[type[nn.Module]] | None = None) -> None:
        """Count from zero, from now on. `ignore_list`: classes that get no line of their own, nor what is in them."""
        self.stop_profile()
        self._ignored = tuple(ignore_list or ())
        self._tallies = {}
        self._counter = counter = _Counter(self.counts_sums)
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
        return f"{short_number(flops)}FLOPs" if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiplications with an addition."""
        macs = self.module_costs()[0].macs
        return f"{short_number(macs)}MACs" if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds in the model's forward."""
        seconds = self.module_costs()[0].seconds
        return short_seconds(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Elements of all parameters, those that are one tensor once."""
        params = self.module_costs()[0].params
        return short_number(params).strip() if as_string else params

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
        lines += step_lines(costs[0], step, 2 + self.recompute_fwd_factor)
        lines += ["", "modules by class", *top_lines(costs, module_depth, top_modules)]
        if detailed:
            lines += ["", "all modules; operations and times are of the forward", *detailed_table(costs)]
        text = "\n".join(lines) + "\n"
        if output_file:
            Path(output_file).absolute().parent.mkdir(parents=True, exist_ok=True)
            with open(output_file, "w") as file:  # whose errors have the name as it was given
                file.write(text)
        else:
            print(text, end="", file=sys.stdout, flush=True)

    def _cost(self, module: nn.Module) -> tuple[int, int, float]:
        """(Operations, MACs, seconds): of a module that is never called itself, as a ModuleList is, its children's."""
        tally = self._tallies.get(module)
        if tally is None:
            return 0, 0, 0.0
        if tally.calls:
            return tally.flops, (tally.flops - tally.sums) // 2, tally.seconds
        inside = [self._cost(child) for child in module.children()]
        return sum(one[0] for one in inside), sum(one[1] for one in inside), sum(one[2] for one in inside)

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


_aten = torch.ops.aten
# Operations an element of what comes out.
_OF_ELEMENTS = {
    1: "add sub mul div exp tanh sigmoid relu relu_ gelu silu elu leaky_relu hardtanh _softmax _log_softmax avg_pool2d",
    5: "native_layer_norm native_group_norm native_batch_norm",
}


class _Counter(FlopCounterMode):
    """torch's, with the products that it does not know, and on demand `sums`: operations that are in no product."""

    def __init__(self, counts_sums: bool) -> None:
        self.sums = 0
        known: dict[Any, Callable[..., int]] = {
            _aten.mv: lambda left, right, **_: 2 * left[0] * left[1],
            _aten.dot: lambda left, right, **_: 2 * left[0],
            _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),  # type: ignore[no-untyped-call]
        }
        if counts_sums:
            known |= {
                _aten.addmm: lambda bias, left, right, out_shape, **_: self._with(out_shape, 2 * left[-1]),
                _aten.baddbmm: lambda bias, left, right, out_shape, **_: self._with(out_shape, 2 * left[-1]),
                _aten.convolution: self._convolution,
            }
            for count, names in _OF_ELEMENTS.items():
                known |= dict.fromkeys((getattr(_aten, one) for one in names.split()), partial(self._elements, count))
        super().__init__(display=False, custom_mapping=known)
        # Its own tracker of modules leaves hooks in the graph, which backward would run into after the count has ended.
        self.mod_tracker = _WholeModel()  # type: ignore[assignment]

    def _elements(self, count: int, *_: Any, out_shape: Any, **__: Any) -> int:
        shape = out_shape[0] if out_shape and not isinstance(out_shape[0], int) else out_shape  # the first of several
        sums: int = count * math.prod(shape)
        self.sums += sums
        return sums

    def _with(self, out_shape: Any, product: int) -> int:
        """Of a product that is added to something."""
        elements = self._elements(1, out_shape=out_shape)
        return product * elements + elements

    def _convolution(
        self, x: Any, w: Any, bias: Any, stride: Any, pad: Any, dilation: Any, transposed: bool, *_: Any, out_shape: Any
    ) -> int:
        product: int = conv_flop_count(x, w, out_shape, transposed=transposed)
        return product if bias is None else product + self._elements(1, out_shape=out_shape)


class _Tally:
    """What forwards of one module have cost so far."""

    def __init__(self, counter: _Counter) -> None:
        self._counter = counter
        self._entered: list[tuple[int, int, float]] = []
        self.reset()

    def reset(self) -> None:
        self.calls, self.flops, self.sums, self.seconds = 0, 0, 0, 0.0

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self._entered.append((self._counter.get_total_flops(), self._counter.sums, seconds_now()))

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.calls += 1
        flops, sums, start = self._entered.pop()
        if not self._entered:  # a module inside of itself counts once
            self.flops += self._counter.get_total_flops() - flops
            self.sums += self._counter.sums - sums
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


def seconds_now() -> float:
    """Seconds on the host's clock, once the GPU, where one is in use, has done what it was asked for."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()
