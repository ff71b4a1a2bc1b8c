"""The parameters that one step of an algorithm works on, as a home lays them before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thinwire.optim.formulas import AdamSettings

__all__ = ["Contribution", "Members", "MembersByGroup"]


@dataclass(frozen=True)
class Contribution:
    """One parameter for which a rank contributes: its number, its group's number and settings, and its state.

    `state`: by name, one-dimensional. `ranks`: how many ranks contribute.
    """

    parameter: int
    group: int
    settings: AdamSettings
    state: Mapping[str, Tensor]
    ranks: int


@dataclass(frozen=True)
class Members:
    """Parameters of one parameter group, or those cuts of them that a home works on: lists of equal length.

    `group`: the parameter group's number, and `settings` its hyperparameters now. `mask`: its `exp_avg_mask`.
    `parameters`: their numbers. `weights`, fp32: what updates are applied to. `averages`, fp32: what the exchange
    brought; an algorithm may use their memory. `state`: by name, as the algorithm declares.
    """

    group: int
    settings: AdamSettings
    mask: Tensor | None
    parameters: list[int]
    weights: list[Tensor]
    averages: list[Tensor]
    state: Mapping[str, list[Tensor]]

    def __getitem__(self, name: str) -> list[Tensor]:
        return self.state[name]


class MembersByGroup:
    """Collects members of several parameter groups one by one."""

    def __init__(
        self, settings: Callable[[int], AdamSettings], mask: Callable[[int], Tensor | None] = lambda group: None
    ) -> None:
        self._settings = settings
        self._mask = mask
        self._groups: dict[int, Members] = {}

    def add(self, group: int, parameter: int, weight: Tensor, average: Tensor, state: Mapping[str, Tensor]) -> None:
        """Add one parameter, or a cut of one."""
        if group not in self._groups:
            of_group: dict[str, list[Any]] = {name: [] for name in state}
            self._groups[group] = Members(group, self._settings(group), self._mask(group), [], [], [], of_group)
        members = self._groups[group]
        members.parameters.append(parameter)
        members.weights.append(weight)
        members.averages.append(average)
        for name, values in state.items():
            members.state[name].append(values)

    def in_order(self) -> list[Members]:
        """What was added, in the groups' order."""
        return [self._groups[number] for number in sorted(self._groups)]
