"""A torch optimizer over what a rank keeps of some parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.zero.disk import SwapFile
from thinwire.zero.home import Fragment
from thinwire.zero.master_weights import FlatBucket, Run
from thinwire.zero.saved_state import SavedSlice, SliceSource, group_settings, read_state, state_slices
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

OptimizerClass = Callable[..., torch.optim.Optimizer]

WHY_NOT_SHARDED = {
    "Adafactor": "its variance is factored over a matrix's rows and columns, so that a shard cannot step alone",
    "LBFGS": "its line search needs a closure and products over all parameters, so that a shard cannot step alone",
    "SparseAdam": "it takes sparse gradients, and gradients here are dense; use Adam",
}
"""Of torch's classes."""


def check_optimizer_class(given: object) -> None:
    """Raise TypeError for what builds no optimizer, ValueError for a class that cannot step shards alone."""
    if not callable(given):
        raise TypeError(
            f"optimizer_class must be an optimizer class, or a function that builds one from groups, got {given!r}: "
            "pass torch.optim.AdamW, and its options beside it"
        )
    name = getattr(given, "__name__", "")
    if name in WHY_NOT_SHARDED and given is getattr(torch.optim, name):
        raise ValueError(f"torch.optim.{name} cannot be sharded: {WHY_NOT_SHARDED[name]}")
    if given is torch.optim.Muon:
        raise ValueError(
            "torch.optim.Muon takes nothing but matrices, and cannot be sharded: pass thinwire.optim.Muon, which has "
            "AdamW for the rest"
        )
    if isinstance(given, type) and issubclass(given, SynchronizedOptimizer):
        raise ValueError(f"{name} communicates by itself: build it on the parameters, or pass torch.optim.AdamW")


class ShardOptimizer:
    """A torch optimizer over what this rank keeps of some parameters.

    It sees each of `views`, the values of `runs`, as a parameter of its own, one-dimensional, in the parameter's group:
    elementwise optimizers do not care where a tensor was cut. `optimizer`: None on a rank that keeps nothing.

    Args:
        runs: parts of parameters, by the parameters' numbers; `views`: their values, fp32.
        groups: the parameter groups, whose settings every step has; `group_of`: each parameter's.
        optimizer_class: builds the torch optimizer of groups.
        bucket: that they lie in; where parameters have one owner, groups have their "shapes", for optimizers that care.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        views: Sequence[Tensor],
        groups: Sequence[Mapping[str, Any]],
        group_of: Sequence[int],
        optimizer_class: OptimizerClass,
        bucket: FlatBucket | None = None,
    ) -> None:
        self._runs = runs
        self._views = views
        self._groups = groups
        self._members = {
            number: [(run, view) for run, view in zip(runs, views, strict=True) if group_of[run.parameter] == number]
            for number in sorted({group_of[run.parameter] for run in runs})
        }
        self._optimizer_class = optimizer_class
        self._shape_of = bucket.shape_of if bucket is not None and bucket.layout.whole else None
        self.reset()

    @property
    def files(self) -> Sequence[SwapFile]:
        """Those that a step reads, in its order."""
        return ()

    def reset(self) -> None:
        """Have a new optimizer, without state."""
        self.optimizer: torch.optim.Optimizer | None = None
        if self._members:
            self.optimizer = self._build(self._members)

    def shown(self) -> torch.optim.Optimizer:
        """The torch optimizer; where nothing is kept, the class and the groups' settings, with no parameter in them."""
        return self.optimizer or self._build({number: [] for number in range(len(self._groups))})

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Step every view with its gradient, and leave those without one alone."""
        if self.optimizer is None:
            return
        for view, gradient in zip(self._views, gradients, strict=True):
            view.grad = gradient
        for number, inner in zip(self._members, self.optimizer.param_groups, strict=True):
            inner.update(group_settings(self._groups[number]))
        self.optimizer.step()
        for view in self._views:
            view.grad = None

    def state_of(self, run: int) -> dict[str, Any]:
        """The state of the run with this number, empty for one that was never stepped."""
        state: dict[str, Any] = {} if self.optimizer is None else self.optimizer.state.get(self._views[run], {})
        return state

    @property
    def states(self) -> list[dict[str, Any]]:
        """The state of every run."""
        return [self.state_of(run) for run in range(len(self._runs))]

    def copies_of_scalars(self) -> list[dict[str, Any]]:
        """The state of every run, with what has a value for each element as it is, and copies of the rest."""
        return [
            {kind: value if is_of_elements(value) else copy.deepcopy(value) for kind, value in state.items()}
            for state in self.states
        ]

    def exchange_states(self, states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Have `states`, by run; those of before."""
        before = self.states
        for view, state in zip(self._views, states, strict=True):
            assert self.optimizer is not None
            self.optimizer.state[view] = state
        return before

    def fragments(self, parameter: int, kind: str) -> list[Fragment]:
        """What there is of a parameter's state of this kind."""
        found = [(run, self.state_of(number).get(kind)) for number, run in enumerate(self._runs)]
        held = [(run, one) for run, one in found if run.parameter == parameter]
        return [Fragment(run.start, one) for run, one in held if isinstance(one, Tensor) and is_of_elements(one)]

    def kinds(self) -> set[str]:
        """The kinds of state that have a value for each element, of any parameter."""
        return {kind for state in self.states for kind, value in state.items() if is_of_elements(value)}

    def state_bytes(self) -> int:
        """Of the state that this rank holds, step counts left out."""
        values = (value for state in self.states for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.dim())

    def saved_slices(self, names: Sequence[str], cuts: Iterable[tuple[int, slice]]) -> list[SavedSlice]:
        """The state of the elements `cuts`, by run."""
        slices: list[SavedSlice] = []
        for number, cut in cuts:
            run = self._runs[number]
            slices += state_slices(self.state_of(number), names[run.parameter], run.start + cut.start, cut, run.numel)
        return slices

    def load(self, source: SliceSource, names: Sequence[str]) -> None:
        """Take over the optimizer's state."""
        if self.optimizer is not None:
            in_order = [run for members in self._members.values() for run, _ in members]
            state = [read_state(source, names[run.parameter], run.start, run.numel) for run in in_order]
            packed = self.optimizer.state_dict()
            # Copies, as what was read may be the memory of a state_dict, which torch would share.
            packed["state"] = {place: copy.deepcopy(of_run) for place, of_run in enumerate(state) if of_run}
            self.optimizer.load_state_dict(packed)

    def _build(self, members: Mapping[int, Sequence[tuple[Run, Tensor]]]) -> torch.optim.Optimizer:
        groups = []
        for number, held in members.items():
            group = {**group_settings(self._groups[number]), "params": [view for _, view in held]}
            if self._shape_of is not None:
                group["shapes"] = [self._shape_of(run.parameter) for run, _ in held]
            groups.append(group)
        return self._optimizer_class(groups)


def is_of_elements(value: Any) -> bool:
    """Whether state has a value for each element of a run."""
    return isinstance(value, Tensor) and value.dim() == 1
