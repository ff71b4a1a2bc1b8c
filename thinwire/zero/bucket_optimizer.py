"""Any elementwise torch optimizer's step on the master weights of one bucket."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.zero.bucket_state import own_fragments
from thinwire.zero.master_weights import MasterWeights, bring_beside
from thinwire.zero.parameter_state import Fragment
from thinwire.zero.saved_slices import SavedSlice, SliceSource
from thinwire.zero.saved_state import group_settings, read_state, state_slices

__all__ = ["BucketOptimizer", "OptimizerClass"]

OptimizerClass = Callable[..., torch.optim.Optimizer]


class BucketOptimizer:
    """A torch optimizer over what this rank keeps of a bucket.

    It sees every run of `masters` as a parameter of its own, one-dimensional, in the parameter's group: elementwise
    optimizers do not care where a tensor was cut. A rank that keeps nothing has no optimizer. Where runs are `whole`
    parameters, groups have their "shapes", for optimizers that do care.
    """

    def __init__(
        self,
        masters: MasterWeights,
        groups: Sequence[Mapping[str, Any]],
        group_of: Sequence[int],
        optimizer_class: OptimizerClass,
        whole: bool = False,
    ) -> None:
        self._whole = whole
        self._masters = masters
        self._groups = groups
        self._group_of = group_of
        self._used_groups = sorted({group_of[run.parameter] for run in masters.runs})
        self._optimizer_class = optimizer_class
        self.optimizer: torch.optim.Optimizer | None = None
        self.reset()

    def reset(self) -> None:
        """Have a new optimizer, without state."""
        if self._masters.runs:
            self.optimizer = self._optimizer_class([self._inner_group(number) for number in self._used_groups])

    def without_parameters(self) -> torch.optim.Optimizer:
        """What a rank that keeps nothing can show: the class and the groups' settings, with no parameter in them."""
        shapes: dict[str, Any] = {"shapes": []} if self._whole else {}
        return self._optimizer_class([{**group_settings(one), "params": [], **shapes} for one in self._groups])

    def step(self, average: Tensor, coefficient: float, absent: frozenset[int]) -> None:
        """Step with `coefficient * average`, a tensor like the master weights in the gradients' dtype.

        `absent` parameters stay. `average` may be scaled in place.
        """
        if self.optimizer is None:
            return
        masters = self._masters
        gradient = average.to(torch.float32)
        if coefficient != 1.0:
            gradient.mul_(coefficient)
        (gradient,) = bring_beside([masters], [gradient])
        for run, view in zip(masters.runs, masters.views, strict=True):
            view.grad = None if run.parameter in absent else gradient[run.place]
        for number, inner in zip(self._used_groups, self.optimizer.param_groups, strict=True):
            inner.update(group_settings(self._groups[number]))
        self.optimizer.step()
        for view in masters.views:
            view.grad = None

    def kinds(self) -> set[str]:
        """The kinds of state that have a value for each element, of any parameter."""
        states = [] if self.optimizer is None else [self.optimizer.state.get(view, {}) for view in self._masters.views]
        return {kind for state in states for kind, value in state.items() if _is_of_elements(value)}

    def state_of(self, parameter: int, kind: str) -> list[Fragment]:
        """What this rank keeps of a parameter's state of this kind; nothing where it was never stepped."""
        if self.optimizer is None:
            return []
        states = [self.optimizer.state.get(view, {}).get(kind) for view in self._masters.views]
        return own_fragments(self._masters, parameter, [one if _is_of_elements(one) else None for one in states])

    def state_bytes(self) -> int:
        """Of the state that this rank holds, step counts left out."""
        states = [] if self.optimizer is None else self.optimizer.state.values()
        return sum(
            value.nbytes for state in states for value in state.values() if isinstance(value, Tensor) and value.dim()
        )

    def saved_slices(self, names: Sequence[str]) -> list[SavedSlice]:
        """The optimizer's state of this rank's shard."""
        slices: list[SavedSlice] = []
        for number, cut in self._masters.own_cuts():
            run = self._masters.runs[number]
            state = {} if self.optimizer is None else self.optimizer.state[self._masters.views[number]]
            slices += state_slices(state, names[run.parameter], run.start + cut.start, cut, run.numel)
        return slices

    def load(self, source: SliceSource, names: Sequence[str]) -> None:
        """Take over the optimizer's state."""
        if self.optimizer is not None:
            runs, views = self._masters.runs, self._masters.views
            number_of = {id(view): number for number, view in enumerate(views)}
            state = [read_state(source, names[run.parameter], run.start, run.numel) for run in runs]
            order = [number_of[id(view)] for group in self.optimizer.param_groups for view in group["params"]]
            packed = self.optimizer.state_dict()
            # Copies, as what was read may be the memory of a state_dict, which torch would share.
            copies = [copy.deepcopy(of_run) for of_run in state]
            packed["state"] = {place: copies[number] for place, number in enumerate(order) if copies[number]}
            self.optimizer.load_state_dict(packed)

    def _inner_group(self, number: int) -> dict[str, Any]:
        runs = zip(self._masters.runs, self._masters.views, strict=True)
        held = [(run, view) for run, view in runs if self._group_of[run.parameter] == number]
        inner = {**group_settings(self._groups[number]), "params": [view for _, view in held]}
        if self._whole:
            inner["shapes"] = [self._masters.bucket.shape_of(run.parameter) for run, _ in held]
        return inner


def _is_of_elements(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1
