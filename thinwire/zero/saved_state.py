"""Parts of a checkpoint of sharded state: runs of one parameter's values under the parameter's own name, so that
any number of ranks, and any stage, can take up what another saved; and what is checked before it is taken up."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.errors import first_fault


@dataclass(frozen=True)
class SavedSlice:
    """Elements `start` to `start + tensor.numel()` of the flattened parameter `name`, in one of its roles.

    `kind` is the role: "weight", "master", "exp_avg", ... Kinds that begin with "scalar." hold one value a parameter.
    `tensor` is one-dimensional and contiguous. With `read` it has no values, on the meta device: that reads them.
    """

    kind: str
    name: str
    start: int
    tensor: Tensor
    read: Callable[[], Tensor] | None = None

    def values(self) -> Tensor:
        """The tensor, read from where it rests."""
        return self.tensor if self.read is None else self.read()


class SliceSource(Protocol):
    """What was saved, to be read in whatever runs the reader needs."""

    @property
    def world_size(self) -> int:
        """Ranks of the job that saved."""

    def counters(self) -> dict[str, Any]:
        """What the optimizer's `counters` returned."""

    def kinds(self) -> set[str]:
        """The roles that any parameter has values for."""

    def dtype_of(self, kind: str, name: str) -> torch.dtype | None:
        """What this parameter's values of this kind were saved in, or None where there are none."""

    def rank_keys(self, rank: int) -> Collection[str]:
        """The keys of what `read_rank` has of that rank of the saving job."""

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """These values, one-dimensional on the CPU; KeyError if they were not saved."""

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

    def dtype_of(self, kind: str, name: str) -> torch.dtype | None:
        """Read the dtype of a kind of a name."""
        found = self._slices.get((kind, name))
        return found[0].tensor.dtype if found else None

    def rank_keys(self, rank: int) -> Collection[str]:
        """List what belonged to one rank."""
        del rank  # there is only this one's
        return self._rank_tensors.keys()

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """Read a run of values."""
        if not numel:  # of an empty parameter no slice is saved
            return torch.empty(0)
        found: list[Tensor] = []
        at, end = start, start + numel
        for saved in sorted(self._slices.get((kind, name), []), key=lambda one: one.start):
            if saved.start <= at < min(end, saved.start + saved.tensor.numel()):
                found.append(saved.values()[at - saved.start : end - saved.start].cpu())
                at += found[-1].numel()
        if at < end:
            raise KeyError(f"elements {start} to {end} of {kind} of {name} are not in this rank's state")
        return found[0] if len(found) == 1 else torch.cat(found)

    def read_rank(self, key: str, rank: int) -> Tensor:
        """Read what belonged to one rank."""
        del rank  # there is only this one's
        return self._rank_tensors[key].cpu()


NO_COPIES = (
    "cannot be copied or pickled: it holds communicators, and its state may lie on all ranks. Save with state_dict() "
    "on every rank, or with the engine's save_checkpoint()"
)

STATE_IS_ON_ALL_RANKS = (
    "its state lies on all ranks, and one rank's would not be enough to go on from. Save with the engine's "
    "save_checkpoint(), or take saved_slices() and counters() of every rank, and load() them"
)

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Positive = Annotated[float, Field(gt=0)]


class Counters(BaseModel):
    """Where a run is, as every optimizer writes and reads it: values of these types and no others. Homes add theirs."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    optimizer: str
    groups: list[dict[str, Any]]
    skipped_steps: Count = 0
    nodes: list[int] | None = None
    part: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None  # of a model on several ranks


_OF_ALGORITHMS = {"settings", "freeze_groups"}  # which torch's optimizers count among elastic workers alone


class DamagedStateError(ValueError):
    """A saved state is not whole, or not what was written."""


AVERAGE_RESIDUAL = "average_residual"
"""The kind of what an owner of averages of gradients lost as it sent them."""

_NO_STATE = frozenset({"weight", "master", AVERAGE_RESIDUAL})
_SCALAR = "scalar."
# The form of a value that has no dimension follows from nothing but its name.
_ONE, _NUMBER = "[1]", "[number]"


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def counters_of(optimizer: str, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The optimizer's name and its groups' settings, as plain values; tensors of several values are left out."""
    return {"optimizer": optimizer, "groups": [plain_settings(group_settings(group)) for group in groups]}


def check_counters(
    saved: Mapping[str, Any],
    counted: type[Counters],
    optimizer: str,
    groups: Sequence[Mapping[str, Any]],
    part: Sequence[int] | None = None,
) -> None:
    """Raise ValueError where an optimizer of this name and of `groups`, which counts `counted`, cannot go on from what
    was `saved`."""
    name, settings = saved.get("optimizer"), saved.get("groups")
    if isinstance(name, str) and isinstance(settings, list) and (name != optimizer or len(settings) != len(groups)):
        raise ValueError(
            f"this state was saved by {name} with {len(settings)} parameter groups, this is {optimizer} with "
            f"{len(groups)}: build the same optimizer, or load the weights alone"
        )
    held, wanted = (_OF_ALGORITHMS & one.keys() for one in (saved, counted.model_fields))
    if {len(held), len(wanted)} == {0, len(_OF_ALGORITHMS)}:
        before, now = ("with", "without") if held else ("without", "with")
        raise ValueError(
            f"this state was saved {before} elastic workers, and this {optimizer} is {now}: build it as it was, or "
            "load the weights alone"
        )
    try:
        counted.model_validate(saved)
    except ValidationError as error:
        raise DamagedStateError(f"it does not hold what {optimizer} counts: {first_fault(error)}") from None
    for number, (mine, theirs) in enumerate(zip(groups, saved["groups"], strict=True)):
        if fault := fault_of_settings(mine, theirs, f"groups.{number}"):
            raise DamagedStateError(f"it does not hold what {optimizer} was set to: {fault}")
    if (theirs := saved.get("part")) != part:
        of = "what belongs to a whole model" if theirs is None else f"part {theirs[0]} of {theirs[1]} of it"
        here = "holds all of one" if part is None else f"has part {part[0]} of {part[1]}"
        raise ValueError(
            f"the model lies on several ranks: this state has {of}, and this rank {here}. Load on every rank of the "
            "same mesh what it saved"
        )


def check_saved(source: SliceSource, kind: str, name: str, *, codes: bool = False) -> None:
    """Raise DamagedStateError unless a parameter's values of this kind were saved, as floats or as 8-bit `codes`."""
    dtype = source.dtype_of(kind, name)
    if dtype is None or (dtype == torch.uint8) is not codes:
        there = "was not saved" if dtype is None else f"is {dtype}"
        raise DamagedStateError(f"it lacks what this optimizer goes on from: {kind} of {name!r} {there}")


def check_weights(source: SliceSource, names: Iterable[str], parameters: Iterable[Tensor]) -> None:
    """Raise DamagedStateError unless `read_weight` finds all of these."""
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.numel() and (parameter.dtype != torch.float32 or source.dtype_of("master", name) is None):
            check_saved(source, "weight", name)


def fault_of_settings(mine: Mapping[str, Any], saved: Mapping[str, Any], path: str) -> str | None:
    """Why a parameter group's settings could not be `saved` ones: not of the kinds that they have, or not finite."""
    if "params" in saved:
        return f"{path} has parameters, which are no setting"
    for fault in unlike(mine, saved, path):
        return fault
    for key, value in saved.items():
        own = mine.get(key)
        if isinstance(own, tuple) and len(own) != len(value):
            return f"{path}.{key} has {len(value)} values, {len(own)} were expected"
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number) and own != value:
                return f"{path}.{key} is {number}, a finite number was expected"
            if key == "betas" and own is not None and not 0 <= number < 1:
                return f"{path}.betas has {number}, numbers from 0 up to, not including, 1 were expected"
    return None


def unlike(mine: Any, saved: Any, path: str) -> Iterator[str]:
    """Where `saved` is of another kind than `mine`; a None of this job says nothing of what others have."""
    if isinstance(mine, Mapping) and isinstance(saved, Mapping):
        for key in mine.keys() & saved.keys():
            yield from unlike(mine[key], saved[key], f"{path}.{key}")
    elif isinstance(mine, list | tuple) and isinstance(saved, list | tuple):
        for number, (one, other) in enumerate(zip(mine, saved, strict=False)):
            yield from unlike(one, other, f"{path}.{number}")
    elif mine is not None and _kind(mine) != _kind(saved) and not (saved is None and isinstance(mine, bool | str)):
        yield f"{path} is {_kind(saved)}, {_kind(mine)} was expected"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, Tensor) and value.numel() == 1:
        return "a number"
    kinds = {Mapping: "an object", list | tuple: "a list", int | float: "a number", str: "a text", Tensor: "a tensor"}
    return next((word for kind, word in kinds.items() if isinstance(value, kind)), "null")


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
    values: dict[str, Tensor] = {}
    for kind in source.kinds() - _NO_STATE:
        with suppress(KeyError):
            values[kind] = source.read(kind, name, *((0, 1) if kind.startswith(_SCALAR) else (start, numel)))
    return state_of_slices(values)


def state_of_slices(values: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state of a part of which `state_slices` gave all elements, by kind."""
    state: dict[str, Any] = {}
    for kind, value in values.items():
        state |= _one_value(kind.removeprefix(_SCALAR), value) if kind.startswith(_SCALAR) else {kind: value}
    return state


def read_weight(source: SliceSource, dtype: torch.dtype | None, name: str, start: int, numel: int) -> Tensor:
    """A parameter's saved values for use in `dtype`: of its master weights, if there are, where fp32 is wanted."""
    if dtype == torch.float32:
        try:
            return source.read("master", name, start, numel)
        except KeyError:  # it was saved from a parameter in fp32, its own master
            return source.read("weight", name, start, numel)
    return source.read("weight", name, start, numel)


def merged_scalars(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The scalars of several freeze groups, of which each has other parameters, or other ranks' of them; what is the
    optimizer's is the same in all."""
    merged: dict[str, Any] = {}
    for group in groups:
        for name, value in group["scalars"].items():
            merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return merged


def ranks_of_residuals(source: SliceSource, comm: Communicator, nodes: Sequence[int] | None) -> list[int] | None:
    """The ranks whose residuals this one goes on with: its own, or of another number of ranks all; None if residuals
    belong to nodes, there or here, and these are others.

    `nodes`: the node of each rank, if residuals belong to nodes.
    """
    saved_nodes = source.counters().get("nodes")
    same = source.world_size == comm.size and saved_nodes == nodes
    if not same and (nodes is not None or saved_nodes is not None):
        return None
    return [comm.rank] if same else list(range(source.world_size))


def mean_over_ranks(source: SliceSource, key: str, ranks: Sequence[int]) -> Tensor:
    """Average these ranks' tensors, fp32."""
    total = source.read_rank(key, ranks[0]).float().clone()
    for rank in ranks[1:]:
        total += source.read_rank(key, rank).float()
    return total.div_(len(ranks))


def _one_value(kind: str, value: Tensor) -> dict[str, Any]:
    """What `state_slices` saved under a kind of one value, in the form that it had."""
    if kind.endswith(_ONE):
        return {kind.removesuffix(_ONE): value}
    if kind.endswith(_NUMBER):
        return {kind.removesuffix(_NUMBER): value.item()}
    return {kind: value[0]}


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same as plain values; tensors of several values are left out."""
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
