"""Parts of a checkpoint of sharded state: runs of one parameter's values under the parameter's own name, so that
any number of ranks, and any stage, can take up what another saved; and the state_dict of one rank as such parts."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.comm.agreement import on_every_rank


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
    """What was saved, to be read in whatever runs the reader needs."""

    @property
    def world_size(self) -> int:
        """Ranks of the job that saved."""

    def counters(self) -> dict[str, Any]:
        """What the optimizer's `counters` returned."""

    def kinds(self) -> set[str]:
        """The roles that any parameter has values for."""

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

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """Read a run of values."""
        if not numel:  # of an empty parameter no slice is saved
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


# The state_dict of one rank

STATE_DICT_FORMAT = 2
"""Of what a rank's `state_dict` holds under "thinwire"."""


def rank_state_source(
    comm: Communicator, home: str, parameters: Sequence[Tensor], state_dict: Mapping[str, Any], optimizer: str
) -> SliceSource:
    """What `state_dict` gave on every rank, for a `home` of that kind to load. Collective where state has to change its
    place.

    Raises ValueError where it is not from one of our optimizers, or not all of the state can be had from it.
    """
    on_every_rank(
        comm, lambda: _check(comm, parameters, state_dict, optimizer), "load its optimizer's state", (ValueError,)
    )
    saved = state_dict["thinwire"]
    whole = saved["home"] == "replicated" or saved["size"] == 1
    if whole and (home == "replicated" or saved["size"] != comm.size or saved["size"] == 1):
        return OneRankState(state_dict)
    return OneRankState(state_dict, _slices_of_all(comm, saved))


def _check(comm: Communicator, parameters: Sequence[Tensor], state_dict: Mapping[str, Any], optimizer: str) -> None:
    """Raise ValueError where this state cannot be loaded."""
    saved = state_dict.get("thinwire")
    if saved is None:
        raise ValueError(
            f"this state_dict has no 'thinwire' entry, so it is not from {optimizer}: give the state of another "
            f"optimizer to that optimizer, and start {optimizer} fresh from the model's weights"
        )
    if saved.get("format") != STATE_DICT_FORMAT:
        raise ValueError(
            f"this state_dict has format {saved.get('format')}, this thinwire reads format {STATE_DICT_FORMAT}"
        )
    for index, entry in state_dict["state"].items():
        given = tuple(entry["exp_avg"].shape) if "exp_avg" in entry else "no state"
        wanted = tuple(parameters[index].shape) if index < len(parameters) else "no such parameter"
        if given != wanted:
            raise ValueError(
                f"the state's parameter {index} has shape {given}, this optimizer's: {wanted}. Build the same model"
            )
    if saved["home"] != "replicated" and saved["size"] not in (1, comm.size):
        raise ValueError(
            f"this state_dict holds the slices of rank {saved['rank']} of {saved['size']}, and this job has "
            f"{comm.size} ranks: save with the engine's save_checkpoint(), which any number of ranks can load"
        )


class OneRankState(OwnSlices):
    """What one rank saved, beside which `slices` of other ranks may lie, read by a rank of any job."""

    def __init__(self, state_dict: Mapping[str, Any], slices: Iterable[SavedSlice] | None = None) -> None:
        saved = state_dict["thinwire"]
        self.rank = int(saved["rank"])
        names = saved["counters"].get("names", ())
        state = [(names[number], entry) for number, entry in state_dict["state"].items()]
        whole = [SavedSlice(kind, name, 0, one.reshape(-1)) for name, entry in state for kind, one in entry.items()]
        beside = _slices_in(saved) if slices is None else slices
        rank_tensors = saved["rank_tensors"] | {f"{one.kind}.{one.name}": one.tensor for one in whole}
        super().__init__(int(saved["size"]), saved["counters"], [*whole, *beside], rank_tensors)

    @override
    def read_rank(self, key: str, rank: int) -> Tensor:
        if rank != self.rank:
            raise KeyError(f"{key} of rank {rank} is not in the state of rank {self.rank}")
        return super().read_rank(key, rank)


def _slices_in(saved: Mapping[str, Any]) -> list[SavedSlice]:
    return [SavedSlice(*one) for one in saved["slices"]]


def _slices_of_all(comm: Communicator, saved: Mapping[str, Any]) -> list[SavedSlice]:
    """Those in what every rank of this job gave, each its own file. Collective."""
    mine = {"rank": saved["rank"], "step": saved["counters"].get("step"), "slices": saved["slices"]}
    everyone = _exchange(comm, mine)
    ranks, steps = [one["rank"] for one in everyone], [one["step"] for one in everyone]
    if ranks != list(range(comm.size)):
        raise ValueError(
            f"the ranks of this job were given the states of ranks {ranks}: every rank has to load the file that "
            "it saved itself, as each holds other slices"
        )
    if len(set(steps)) > 1:
        raise ValueError(f"the ranks were given states after steps {steps}: load what all of them saved at once")
    return [saved_slice for one in everyone for saved_slice in _slices_in(one)]


def _exchange(comm: Communicator, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank gave, in rank order; plain values and tensors. Collective."""
    file = io.BytesIO()
    torch.save(mine, file)
    raw = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    lengths = [int(length) for length in comm.all_gather_bytes(str(len(raw)).encode(), "gather its ranks' state")]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(raw)] = raw
    received = torch.empty(comm.size * len(padded), dtype=torch.uint8)
    comm.all_gather(received, padded)
    rows = received.view(comm.size, -1)
    return [
        torch.load(io.BytesIO(row[:length].numpy().tobytes()), weights_only=True)
        for row, length in zip(rows, lengths, strict=True)
    ]
