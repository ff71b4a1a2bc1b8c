"""Parts of a checkpoint of sharded state: runs of one parameter's values under the parameter's own name, so that
any number of ranks, and any stage, can take up what another saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = [
    "STATE_IS_ON_ALL_RANKS",
    "OwnSlices",
    "SavedSlice",
    "SliceSource",
    "check_same_optimizer",
    "counters_of",
    "group_settings",
    "read_state",
    "read_weight",
    "state_slices",
    "take_over_settings",
]


@dataclass(frozen=True)
class SavedSlice:
    """Elements `start` to `start + tensor.numel()` of the flattened parameter `name`, in one of its roles.

    `kind` is the role: "weight", "master", "exp_avg", ... Kinds that begin with "scalar." hold one value a parameter.
    `tensor` is one-dimensional and contiguous.
    """

    kind: str
    name: str
    start: int
    tensor: Tensor


class SliceSource(Protocol):
    """What somebody saved, to be read in whatever runs the reader needs."""

    @property
    def world_size(self) -> int:
        """Ranks of the job that saved."""

    def counters(self) -> dict[str, Any]:
        """What the optimizer's `counters` returned."""

    def kinds(self) -> set[str]:
        """The roles that any parameter has values for."""

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """These values, one-dimensional on the CPU; KeyError where nobody saved them."""

    def read_rank(self, key: str, rank: int) -> Tensor:
        """`rank_tensors()[key]` of that rank of the saving job; KeyError where there is none."""


class OwnSlices:
    """The slices of one rank as a source for the same rank of a job of the same size."""

    def __init__(
        self, world_size: int, counters: dict[str, Any], slices: Iterable[SavedSlice], rank_tensors: dict[str, Tensor]
    ) -> None:
        self.world_size = world_size
        self._counters = counters
        self._rank_tensors = rank_tensors
        self._slices: dict[tuple[str, str], list[SavedSlice]] = {}
        for saved in slices:
            self._slices.setdefault((saved.kind, saved.name), []).append(saved)

    def counters(self) -> dict[str, Any]:
        """Read plain values, the same on every rank."""
        return self._counters

    def kinds(self) -> set[str]:
        """List the kinds that were saved of a name."""
        return {kind for kind, _ in self._slices}

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """Read a run of values."""
        if not numel:  # of an empty parameter nobody saves a slice
            return torch.empty(0)
        found: list[Tensor] = []
        at, end = start, start + numel
        for saved in sorted(self._slices.get((kind, name), []), key=lambda one: one.start):
            if saved.start <= at < min(end, saved.start + saved.tensor.numel()):
                found.append(saved.tensor[at - saved.start : end - saved.start].cpu())
                at += found[-1].numel()
        if at < end:
            raise KeyError(f"elements {start} to {end} of {kind} of {name} are not in this rank's state")
        return found[0] if len(found) == 1 else torch.cat(found)

    def read_rank(self, key: str, rank: int) -> Tensor:
        """Read what belonged to one rank."""
        del rank  # there is only this one's
        return self._rank_tensors[key].cpu()


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
