"""The state_dict of one rank: parts of a checkpoint beside what torch has, as they are written, sealed and read."""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.comm.agreement import check_same_on_every_rank, on_every_rank
from thinwire.comm.errors import first_fault
from thinwire.zero.home import Home
from thinwire.zero.saved_state import (
    Count,
    DamagedStateError,
    OwnSlices,
    SavedSlice,
    SliceSource,
    fault_of_settings,
    group_settings,
    plain_settings,
)

STATE_DICT_FORMAT: Literal[2] = 2
"""Of what a rank's `state_dict` holds under "thinwire"."""


class _RankState(BaseModel):
    """Of a rank's `state_dict`, what torch has no place for: as it is written and read."""

    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)

    format: Literal[2]
    home: Literal["replicated", "sharded", "local"]
    rank: Count
    size: Annotated[Count, Field(ge=1)]
    counters: dict[str, Any]
    slices: list[tuple[str, str, Count, Tensor]]
    rank_tensors: dict[str, Tensor]
    seal: str | None = None  # of earlier versions there is none


class _Group(BaseModel):
    """A parameter group in a `state_dict`: settings, and numbers of parameters."""

    model_config = ConfigDict(strict=True, extra="allow")

    params: list[Count]


class _TorchState(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", arbitrary_types_allowed=True)

    state: dict[Count, dict[str, Tensor]]
    param_groups: list[_Group]
    thinwire: _RankState


def seal(state_dict: Mapping[str, Any]) -> str:
    """The sha256 of all that a rank's state_dict says but its `param_groups` and the values in tensors: who changed or
    lost some of it since it was saved finds another one."""
    entry = state_dict["thinwire"]

    def form(one: Tensor) -> list[Any]:
        return [str(one.dtype), *one.shape]

    said = [
        [entry["home"], entry["rank"], entry["size"]],
        {key: value for key, value in entry["counters"].items() if key != "groups"},
        [[kind, name, start, *form(one)] for kind, name, start, one in entry["slices"]],
        {key: form(one) for key, one in entry["rank_tensors"].items()},
        {number: {kind: form(one) for kind, one in of_one.items()} for number, of_one in state_dict["state"].items()},
    ]
    return hashlib.sha256(json.dumps(said, skipkeys=True, default=str).encode()).hexdigest()


def add_to(
    packed: dict[str, Any],
    home: Home,
    counters: dict[str, Any],
    slices: Iterable[SavedSlice],
    rank_tensors: Mapping[str, Tensor],
) -> dict[str, Any]:
    """What torch has `packed`, with what it has no place for under "thinwire": all of a rank's state."""
    in_state = {kind for entry in packed["state"].values() for kind in entry}
    beside = in_state | {"weight"} if in_state else set()
    packed["thinwire"] = dict(
        _RankState(
            format=STATE_DICT_FORMAT,
            home=home.kind,  # type: ignore[arg-type]
            rank=home.comm.rank,
            size=home.comm.size,
            counters=counters,
            slices=[(one.kind, one.name, one.start, one.values()) for one in slices if one.kind not in beside],
            rank_tensors={key: one for key, one in rank_tensors.items() if key.split(".")[0] not in in_state},
        )
    )
    packed["thinwire"]["seal"] = seal(packed)
    return packed


def rank_state_source(
    home: Home, groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any], optimizer: str
) -> SliceSource:
    """What `state_dict` gave on every rank, for `home` to load, its settings those of `param_groups`. Collective.

    Raises ValueError, on every rank, where it is not from one of our optimizers, not as it was saved, or not all of the
    state can be had from it.
    """
    comm, check = home.comm, partial(_check, home, groups, state_dict, optimizer)
    on_every_rank(comm, check, "load its optimizer's state", (ValueError,))
    saved = state_dict["thinwire"]
    if home.kind != "local":  # whose ranks may have rates, and a place, of their own
        given = [group_settings(group) for group in state_dict["param_groups"]]
        counted = {key: value for key, value in saved["counters"].items() if key != "groups"}
        check_same_on_every_rank(comm, [], given, {"state saved at step": counted.get("step"), "counters": counted})
    whole = saved["home"] == "replicated" or saved["size"] == 1
    if whole and (home.kind == "replicated" or saved["size"] != comm.size or saved["size"] == 1):
        return OneRankState(state_dict)
    return OneRankState(state_dict, _slices_of_all(comm, saved))


def _check(home: Home, groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any], optimizer: str) -> None:
    comm, parameters = home.comm, home.parameters
    saved = state_dict.get("thinwire") if isinstance(state_dict, Mapping) else None
    if saved is None:
        raise ValueError(
            f"this state_dict has no 'thinwire' entry, so it is not from {optimizer}: give the state of another "
            f"optimizer to that optimizer, and start {optimizer} fresh from the model's weights"
        )
    given = saved.get("format") if isinstance(saved, Mapping) else None
    if isinstance(given, int) and given != STATE_DICT_FORMAT:
        raise ValueError(f"this state_dict has format {given}, this thinwire reads format {STATE_DICT_FORMAT}")
    try:
        _TorchState.model_validate(dict(state_dict))
    except ValidationError as error:
        raise DamagedStateError(
            f"this state_dict is not as state_dict() gave it: {first_fault(error)}. {_AS_SAVED}"
        ) from None
    for index, entry in state_dict["state"].items():
        one = entry.get("exp_avg", next(iter(entry.values()), None))
        given = "no state" if one is None else tuple(one.shape)
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
    if saved.get("seal") is not None and saved["seal"] != seal(state_dict):
        raise DamagedStateError(
            "the 'thinwire' entry of this state_dict, or of what shapes and dtypes 'state' is, "
            f"was changed since state_dict() gave it. {_AS_SAVED}"
        )
    if fault := _fault_of_groups(groups, state_dict["param_groups"], saved["counters"].get("groups")):
        raise DamagedStateError(f"param_groups of this state_dict: {fault}. {_AS_SAVED}")


_AS_SAVED = "Load it as it was saved; settings in its param_groups, as lr or weight_decay, may be others"


def _fault_of_groups(groups: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]], saved: Any) -> str | None:
    """What of the `given` groups is none of what `groups` have, and `saved`, which were theirs."""
    sizes, numbers = [len(group["params"]) for group in groups], 0
    if [len(group["params"]) for group in given] != sizes:
        return f"they have {[len(group['params']) for group in given]} parameters, this optimizer's {sizes}"
    for number, (mine, theirs) in enumerate(zip(groups, given, strict=True)):
        if theirs["params"] != list(range(numbers, numbers + sizes[number])):
            return f"group {number} has not the parameters from {numbers} on in their order"
        numbers += sizes[number]
        known = saved[number] if isinstance(saved, list) and number < len(saved) else {}
        if lost := (set(known) if isinstance(known, Mapping) else set()) - set(theirs):
            return f"group {number} has no {min(lost)!r}"
        if fault := fault_of_settings(group_settings(mine), group_settings(theirs), f"group {number}"):
            return fault
    return None


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
        counters = {
            **saved["counters"],
            "groups": [plain_settings(group_settings(one)) for one in state_dict["param_groups"]],
        }
        super().__init__(int(saved["size"]), counters, [*whole, *beside], rank_tensors)

    @override
    def rank_keys(self, rank: int) -> Collection[str]:
        return super().rank_keys(rank) if rank == self.rank else ()

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


def warn_of_lost_residuals(source: SliceSource, comm: Communicator) -> None:
    """Warn that an optimizer that compresses begins without residuals."""
    saved_by = f"rank {source.rank}" if isinstance(source, OneRankState) else "a job"
    warnings.warn(
        f"this state was saved by {saved_by} of {source.world_size} and is loaded by rank {comm.rank} of {comm.size}, "
        "on other nodes, or as another part of the model: error-feedback residuals belong to one rank, so they start "
        "from zero here. To keep them, save and load state_dict() on every rank",
        RuntimeWarning,
        stacklevel=6,
    )
