"""An optimizer's parameters under one running number, whatever group they are in: how buckets, checkpoints and error
messages refer to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["ParameterTable"]


class ParameterTable:
    """The parameters of `optimizer`, numbered in the order of its groups, with their group, state and name.

    16-bit parameters get an fp32 master weight, in their state as `master`: an update far below a weight's last bit
    would otherwise be lost.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.parameters: list[Tensor] = []
        self._optimizer = optimizer
        self._group_numbers: list[int] = []
        self._published: list[int] = []  # versions: a parameter changed since by somebody else outdates its master

    def __len__(self) -> int:
        return len(self.parameters)

    def new_parameters(self) -> list[tuple[Tensor, int]]:
        """Parameters, with their group's number, that the optimizer holds and this table does not yet."""
        held = [
            (parameter, number)
            for number, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
        ]
        return held[len(self) :]

    def add(self, parameter: Tensor, group_number: int) -> None:
        """Give `parameter` the next number."""
        self.parameters.append(parameter)
        self._group_numbers.append(group_number)
        self._published.append(parameter._version)
        self.make_master(len(self) - 1)

    def make_master(self, index: int) -> None:
        """(Re)build the master weight of a 16-bit parameter, or of one that has been given one, from the parameter."""
        if self.parameters[index].dtype != torch.float32 or "master" in self.state(index):
            self._copy_to_master(index)

    def keep_apart(self, index: int) -> None:
        """Give the parameter a master weight whatever its dtype, so that the two may come to differ."""
        if "master" not in self.state(index):
            self._copy_to_master(index)

    def group_number(self, index: int) -> int:
        """Which parameter group it is in."""
        return self._group_numbers[index]

    def group(self, index: int) -> dict[str, Any]:
        """Its parameter group."""
        return self._optimizer.param_groups[self._group_numbers[index]]

    def groups(self) -> list[dict[str, Any]]:
        """All parameter groups."""
        return self._optimizer.param_groups

    def state(self, index: int) -> dict[str, Any]:
        """Its entry in the optimizer's state."""
        state: dict[str, Any] = self._optimizer.state[self.parameters[index]]
        return state

    def weight(self, index: int) -> Tensor:
        """What updates are applied to: the fp32 master where there is one, else the parameter."""
        if "master" in self.state(index) and self.changed(index):
            self.make_master(index)  # weights were loaded into the model since
        master: Tensor = self.state(index).get("master", self.parameters[index])
        return master

    def publish(self, index: int) -> None:
        """Round the master weight, where there is one, into the parameter."""
        weight = self.weight(index)
        if weight is not self.parameters[index]:
            self.show(index, weight)

    def show(self, index: int, weight: Tensor) -> None:
        """Round `weight` into the parameter, and leave the master as it is."""
        self.parameters[index].copy_(weight)
        self.accept(index)

    def changed(self, index: int) -> bool:
        """Whether somebody else has written to the parameter since it was last published."""
        return self.parameters[index]._version != self._published[index]

    def accept(self, index: int) -> None:
        """Take the parameter as it is for what was published: its master stays."""
        self._published[index] = self.parameters[index]._version

    def _copy_to_master(self, index: int) -> None:
        self.state(index)["master"] = self.parameters[index].detach().float().clone()
        self.accept(index)

    def name(self, index: int) -> str:
        """How an error message calls it."""
        number = self._group_numbers[index]
        position = index - self._group_numbers.index(number)
        names = self.group(index).get("param_names")
        called = f" {names[position]!r}" if names else ""
        return f"parameter {position} of group {number}{called}, shape {tuple(self.parameters[index].shape)},"
