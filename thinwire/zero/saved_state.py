"""What optimizers of every ZeRO stage save and take up again alike: settings of groups, state of cut parameters,
weights with or without masters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.zero.saved_slices import SavedSlice, SliceSource

__all__ = [
    "STATE_IS_ON_ALL_RANKS",
    "check_same_optimizer",
    "counters_of",
    "group_settings",
    "read_state",
    "read_weight",
    "state_slices",
    "take_over_settings",
]

STATE_IS_ON_ALL_RANKS = (
    "its state lies on all ranks, and one rank's would not be enough to go on from. Save with the engine's "
    "save_checkpoint(), or take saved_slices() and counters() of every rank, and load() them"
)

_WEIGHTS = frozenset({"weight", "master"})
_SCALAR = "scalar."
# The form of a value that has no dimension follows from nothing but its name.
_ONE, _NUMBER = "[1]", "[number]"


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def counters_of(optimizer: str, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The optimizer's name and its groups' settings, as plain values; tensors of several values are left out."""
    return {"optimizer": optimizer, "groups": [_plain(group_settings(group)) for group in groups]}


def check_same_optimizer(saved: Mapping[str, Any], optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError where `saved`, of `counters_of`, are another optimizer's."""
    if saved["optimizer"] != optimizer or len(saved["groups"]) != len(groups):
        raise ValueError(
            f"this state was saved by {saved['optimizer']} with {len(saved['groups'])} parameter groups, this is "
            f"{optimizer} with {len(groups)}: build the same optimizer, or load the weights alone"
        )


def take_over_settings(saved: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Set `groups` as `counters_of` has saved them."""
    for group, settings in zip(groups, saved["groups"], strict=True):
        group.update({key: _like(group.get(key), value) for key, value in settings.items()})


def state_slices(state: Mapping[str, Any], name: str, start: int, cut: slice, numel: int) -> Iterator[SavedSlice]:
    """The elements `cut` of the state of a part of `numel` elements, those of parameter `name` from `start` on.

    What has one value for all of them, such as a step count, goes with the parameter's first element, in its own form:
    a tensor without dimensions or of one element, or a number.
    """
    for kind, value in state.items():
        if isinstance(value, Tensor) and value.shape == (numel,):
            yield SavedSlice(kind, name, start, value[cut])
        elif start == 0 and value is not None:
            form = (
                "" if isinstance(value, Tensor) and value.dim() == 0 else _ONE if isinstance(value, Tensor) else _NUMBER
            )
            yield SavedSlice(_SCALAR + kind + form, name, 0, torch.as_tensor(value).reshape(1).detach())


def read_state(source: SliceSource, name: str, start: int, numel: int) -> dict[str, Any]:
    """The state of elements `start` to `start + numel` of a parameter; empty where it never had a gradient."""
    state: dict[str, Any] = {}
    for kind in source.kinds() - _WEIGHTS:
        try:
            if kind.startswith(_SCALAR):
                state |= _one_value(kind.removeprefix(_SCALAR), source.read(kind, name, 0, 1))
            else:
                state[kind] = source.read(kind, name, start, numel)
        except KeyError:
            continue
    return state


def read_weight(source: SliceSource, dtype: torch.dtype, name: str, start: int, numel: int) -> Tensor:
    """A parameter's saved values for use in `dtype`: the masters' where fp32 is wanted and there are masters."""
    if dtype == torch.float32:
        try:
            return source.read("master", name, start, numel)
        except KeyError:  # it was saved from a parameter in fp32, its own master
            return source.read("weight", name, start, numel)
    return source.read("weight", name, start, numel)


def _one_value(kind: str, value: Tensor) -> dict[str, Any]:
    """What `state_slices` saved under a kind of one value, in the form that it had."""
    if kind.endswith(_ONE):
        return {kind.removesuffix(_ONE): value}
    if kind.endswith(_NUMBER):
        return {kind.removesuffix(_NUMBER): value.item()}
    return {kind: value[0]}


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: float(value) if isinstance(value, Tensor) else value
        for key, value in settings.items()
        if not (isinstance(value, Tensor) and value.numel() != 1)
    }


def _like(mine: Any, saved: Any) -> Any:
    """A saved plain value in the type that this optimizer uses for it."""
    if isinstance(mine, Tensor):
        return torch.as_tensor(saved, dtype=mine.dtype, device=mine.device)
    return tuple(saved) if isinstance(mine, tuple) else saved
