"""A torch optimizer's own step on gradients that are averaged, exactly or through a codec, for ever: an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.optim.algorithm import Algorithm, Form, Keep
from thinwire.optim.step import Clock, Members
from thinwire.zero.saved_state import group_settings

Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
Groups = Sequence[Mapping[str, Any]]


@dataclass
class Shares:
    """`mine`: the parameters, by number, whose state lies here. `publish`: called with all that a step moves anywhere,
    once those that are `mine` have been moved here."""

    mine: set[int]
    publish: Callable[[Sequence[int]], None] = field(default=lambda moved: None)


class TorchSteps(Algorithm):
    """The steps of the torch optimizer that `build` makes of groups, over weights of parameters of these `groups`.

    State of the kinds `held`, which have a value for each element, lies in buckets once it has begun, and the rest, as
    step counts, are its scalars.
    """

    form = Form("", None, payload=None, update=None)

    def __init__(self, build: Build, groups: Groups, held: Iterable[str], shares: Shares | None) -> None:
        """`shares`: of state that workers divide, none of which lies in buckets."""
        self.state = {} if shares else dict.fromkeys(held, Keep.EVERY_RANK)
        self._build, self._groups, self.shares = build, groups, shares
        self._begin()

    def _begin(self) -> None:
        self._weights = self._new_weights([one for group in self._groups for one in group["params"]])
        left = iter(self._weights)
        groups = [{**group_settings(group), "params": [next(left) for _ in group["params"]]} for group in self._groups]
        self.optimizer = self._build(groups)
        self._held: dict[int, set[str]] = {}  # kinds that lie in buckets, by the number of a parameter that has begun

    def _new_weights(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What the torch optimizer steps of all parameters."""
        return [one.detach().float() for one in parameters]

    @override
    def move(self, groups: Sequence[Members], clock: Clock) -> None:
        for inner, group in zip(self.optimizer.param_groups, self._groups, strict=True):
            inner.update(group_settings(group))
        moved = [(number, members, place) for members in groups for place, number in enumerate(members.parameters)]
        of_all = [one for one in moved if self.shares is None or one[0] in self.shares.mine]
        for number, members, place in of_all:
            weight, own = members.weights[place].detach(), self._weights[number]
            if own.data_ptr() != weight.data_ptr():
                own.data = weight
            own.grad = members.averages[place]
            for kind in self._held.get(number, ()):
                self.optimizer.state[own][kind] = members[kind][place]
        self.optimizer.step()
        for number, members, place in of_all:
            own, own.grad = self._weights[number], None
            state = self.optimizer.state[own]
            self._held[number] = {kind for kind in state.keys() & self.state if is_of_elements(state[kind], own)}
            for kind in self._held[number]:
                if state[kind] is not members[kind][place]:
                    members[kind][place].copy_(state[kind])
        if self.shares is not None:
            self.shares.publish([number for number, *_ in moved])

    def state_of(self, number: int) -> dict[str, Any]:
        """A parameter's state: tensors in its shape, and what is one value for all elements."""
        return dict(self.optimizer.state.get(self._weights[number], {}))

    def set_state(self, number: int, state: Mapping[str, Any]) -> None:
        """Go on with such state, flat or in shape, or with none."""
        own = self._weights[number]
        self.optimizer.state.pop(own, None)
        if state:
            self.optimizer.state[own] = {
                kind: one.clone().view(own.shape) if isinstance(one, Tensor) and one.shape == (own.numel(),) else one
                for kind, one in state.items()
            }

    @override
    def scalars(self, names: Sequence[str]) -> dict[str, Any]:
        if self.shares is not None:
            return {"torch": {names[number]: {"held": [], "beside": {}} for number in sorted(self.shares.mine)}}
        found: dict[str, Any] = {}
        for number, held in self._held.items():
            state = self.optimizer.state[self._weights[number]]
            beside = {kind: _told(one) for kind, one in state.items() if kind not in held and one is not None}
            found[names[number]] = {"held": sorted(held), "beside": beside}
        return {"torch": found}

    @override
    def load_scalars(self, saved: Mapping[str, Any], names: Sequence[str]) -> None:
        self._begin()
        if self.shares is not None:
            self.shares.mine = {number for number, name in enumerate(names) if name in saved["torch"]}
            return
        for number, name in enumerate(names):
            if (told := saved["torch"].get(name)) is not None:
                own = self._weights[number]
                self._held[number] = {*told["held"]}
                values = {kind: _of_told(one, own.device) for kind, one in told["beside"].items()}
                self.optimizer.state[own] = dict.fromkeys(told["held"]) | values


def is_of_elements(value: Any, weight: Tensor) -> bool:
    """Whether a weight's state has a value for each of its elements."""
    return isinstance(value, Tensor) and value.shape == weight.shape


def _told(value: Any) -> dict[str, Any]:
    """A value as plain values."""
    if not isinstance(value, Tensor):
        return {"value": value, "dtype": None, "beside_weight": False}
    dtype = str(value.dtype).removeprefix("torch.")
    return {"value": value.tolist(), "dtype": dtype, "beside_weight": value.device.type != "cpu"}


def _of_told(told: Mapping[str, Any], device: torch.device) -> Any:
    if told["dtype"] is None:
        return told["value"]
    where = device if told["beside_weight"] else "cpu"
    return torch.tensor(told["value"], dtype=getattr(torch, told["dtype"]), device=where)
