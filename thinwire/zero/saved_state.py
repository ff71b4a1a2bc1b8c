"""What optimizers of every ZeRO stage save and take up again alike: settings of groups, state of cut parameters,
weights with or without masters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.zero.saved_slices import SCALAR, Piece, PieceSource

__all__ = [
    "STATE_IS_ON_ALL_RANKS",
    "check_same_optimizer",
    "counters_of",
    "group_settings",
    "read_state",
    "read_weight",
    "state_pieces",
    "take_over_settings",
]

STATE_IS_ON_ALL_RANKS = (
    "its state lies on all ranks, and one rank's would not be enough to go on from. Save with the engine's "
    "save_checkpoint(), or take pieces() and counters() of every rank, and load() them"
)

_WEIGHTS = frozenset({"weight", "master"})


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


def state_pieces(state: Mapping[str, Any], name: str, start: int, cut: slice) -> Iterator[Piece]:
    """The elements `cut` of a part's state, which are those of parameter `name` from `start` on.

    What is no vector, such as a step count, goes with the parameter's first element.
    """
    for kind, value in state.items():
        if isinstance(value, Tensor) and value.dim() == 1:
            yield Piece(kind, name, start, value[cut])
        elif start == 0 and value is not None:
            yield Piece(SCALAR + kind, name, 0, torch.as_tensor(value).reshape(1).detach())


def read_state(source: PieceSource, name: str, start: int, numel: int) -> dict[str, Tensor]:
    """The state of elements `start` to `start + numel` of a parameter; empty where it never had a gradient."""
    state = {}
    for kind in source.kinds() - _WEIGHTS:
        try:
            if kind.startswith(SCALAR):
                state[kind.removeprefix(SCALAR)] = source.read(kind, name, 0, 1)[0]
            else:
                state[kind] = source.read(kind, name, start, numel)
        except KeyError:
            continue
    return state


def read_weight(source: PieceSource, dtype: torch.dtype, name: str, start: int, numel: int) -> Tensor:
    """A parameter's saved values for use in `dtype`: the masters' where fp32 is wanted and there are masters."""
    if dtype == torch.float32:
        try:
            return source.read("master", name, start, numel)
        except KeyError:  # it was saved from a parameter in fp32, its own master
            return source.read("weight", name, start, numel)
    return source.read("weight", name, start, numel)


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
