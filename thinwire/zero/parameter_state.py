"""What an optimizer holds of one parameter, in the places where it holds it, and how it is found from the parameter."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.comm import Communicator

__all__ = ["Fragment", "Held", "ParameterState", "StateOwner", "claim", "find_state", "local_values", "whole_values"]

_ATTRIBUTE = "_thinwire_state"


@dataclass(frozen=True)
class Fragment:
    """Elements `start` to `start + values.numel()` of the flattened parameter: a one-dimensional view of where they
    are kept."""

    start: int
    values: Tensor


@dataclass(frozen=True)
class Held:
    """What this rank keeps of one parameter's values in one role.

    `everywhere`: every rank keeps all of them; else each rank what it owns, and the ranks' union is everything once.
    `known`: whether this rank keeps values in that role for any parameter at all.
    """

    fragments: Sequence[Fragment]
    everywhere: bool
    known: bool = True


class ParameterState(ABC):
    """The values that an optimizer keeps for its parameters, by the parameter's number."""

    comm: Communicator
    cuts_parameters: bool
    """Whether a rank has a part of every parameter only, as at stage 3."""

    @abstractmethod
    def parameter(self, number: int) -> Tensor:
        """The parameter."""

    @abstractmethod
    def weights(self, number: int) -> Held:
        """The fp32 weights that steps change. Collective where new ones are on their way."""

    @abstractmethod
    def after_writing_weights(self, number: int, value: Tensor | None) -> None:
        """Have the parameter follow what was written into its `weights`; `value`: all of them, in its shape."""

    @abstractmethod
    def state(self, number: int, kind: str) -> Held:
        """The optimizer's state of this kind; raises RuntimeError where it has another meaning now."""

    def check_may_write_state(self, kind: str) -> None:
        """Raise RuntimeError where other state would have to follow, and cannot."""

    @abstractmethod
    def gradient(self, number: int) -> Held | None:
        """The averaged gradient of the step under way, times the loss scale; None where there is none yet.

        Collective: waits for what has left. Raises RuntimeError where no gradients are averaged.
        """

    @abstractmethod
    def after_writing_gradient(self, number: int) -> None:
        """Have the step count with what was written into `gradient`."""

    @abstractmethod
    def kinds(self) -> list[str]:
        """The kinds of state that this rank keeps."""


class StateOwner(Protocol):
    """What lives as long as the state does."""

    def parameter_state(self) -> ParameterState:
        """What is held by parameter."""


class _Claim:
    """On a parameter: who holds its state, under which number. It neither keeps the owner alive nor is it saved."""

    def __init__(self, owner: StateOwner, number: int) -> None:
        self.owner = weakref.ref(owner)
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def claim(owner: StateOwner, parameters: Iterable[Tensor]) -> None:
    """Note on those of `parameters` that train, numbered in this order, that `owner` holds their state.

    The last owner that says so does.
    """
    for number, parameter in enumerate(parameters):
        if parameter.requires_grad:
            setattr(parameter, _ATTRIBUTE, _Claim(owner, number))


def find_state(parameter: Tensor) -> tuple[ParameterState, int] | None:
    """Who holds a parameter's state, and its number there; None where nobody does."""
    noted: _Claim | None = getattr(parameter, _ATTRIBUTE, None)
    owner = None if noted is None else noted.owner()
    return None if noted is None or owner is None else (owner.parameter_state(), noted.number)


def whole_values(state: ParameterState, number: int, held: Held) -> tuple[Tensor, bool]:
    """All values, a new fp32 tensor in the parameter's shape and on its device, and whether any rank knows the role.

    Collective, unless every rank keeps them.
    """
    parameter = state.parameter(number)
    numel = parameter.numel()
    values = torch.zeros(numel + 1, device=parameter.device)
    values[-1] = held.known
    for one in held.fragments:
        values[one.start : one.start + one.values.numel()].copy_(one.values)
    if not held.everywhere:
        state.comm.all_reduce(values)
    return values[:numel].view(parameter.shape), bool(values[-1] > 0)


def local_values(held: Held, device: torch.device) -> Tensor:
    """What this rank keeps, a new fp32 tensor, [elements]."""
    values = [one.values.to(device=device, dtype=torch.float32, copy=True) for one in held.fragments]
    return values[0] if len(values) == 1 else torch.cat([*values, torch.empty(0, device=device)])
