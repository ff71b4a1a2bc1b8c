"""One rank's part of an optimizer's state as a dict of plain values and tensors, and what any home makes of such
dicts: what `state_dict` and `load_state_dict` stand on."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.comm.agreement import raise_together
from thinwire.zero.home import Home
from thinwire.zero.saved_state import OwnSlices, SavedSlice, SliceSource

__all__ = ["OneRankState", "pack_rank_state", "rank_state_source"]

_FORMAT = 2


def pack_rank_state(home: Home, counters: dict[str, Any], rank_tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What `state_dict()["thinwire"]` holds; what torch's own `state` holds already is left out."""
    in_state = {kind for entry in home.torch_state().values() for kind in entry}
    beside = in_state | {"weight"} if in_state else set()
    return {
        "format": _FORMAT,
        "home": home.kind,
        "rank": home.comm.rank,
        "size": home.comm.size,
        "counters": counters,
        "slices": [
            (one.kind, one.name, one.start, one.tensor) for one in home.saved_slices() if one.kind not in beside
        ],
        "rank_tensors": {key: one for key, one in rank_tensors.items() if key.split(".")[0] not in in_state},
    }


def rank_state_source(home: Home, state_dict: Mapping[str, Any], optimizer: str) -> SliceSource:
    """What `state_dict` gave on every rank, for `home` to load. Collective where state has to change its place.

    Raises ValueError where it is not from one of our optimizers, or not all of the state can be had from it.
    """
    error: ValueError | None = None
    try:
        _check(home, state_dict, optimizer)
    except ValueError as raised:
        error = raised
    raise_together(home.comm, error, "load its optimizer's state")
    saved = state_dict["thinwire"]
    whole = saved["home"] == "replicated" or saved["size"] == 1
    if whole and (home.kind == "replicated" or saved["size"] != home.comm.size or saved["size"] == 1):
        return OneRankState(state_dict)
    return _Gathered(home.comm, state_dict)


def _check(home: Home, state_dict: Mapping[str, Any], optimizer: str) -> None:
    """Raise ValueError where this state cannot be loaded."""
    saved = state_dict.get("thinwire")
    if saved is None:
        raise ValueError(
            f"this state_dict has no 'thinwire' entry, so it is not from {optimizer}: give the state of another "
            f"optimizer to that optimizer, and start {optimizer} fresh from the model's weights"
        )
    if saved.get("format") != _FORMAT:
        raise ValueError(f"this state_dict has format {saved.get('format')}, this thinwire reads format {_FORMAT}")
    for index, entry in state_dict["state"].items():
        given = tuple(entry["exp_avg"].shape) if "exp_avg" in entry else "no state"
        wanted = tuple(home.parameters[index].shape) if index < len(home.parameters) else "no such parameter"
        if given != wanted:
            raise ValueError(
                f"the state's parameter {index} has shape {given}, this optimizer's: {wanted}. Build the same model"
            )
    if saved["home"] != "replicated" and saved["size"] not in (1, home.comm.size):
        raise ValueError(
            f"this state_dict holds the slices of rank {saved['rank']} of {saved['size']}, and this job has "
            f"{home.comm.size} ranks: save with the engine's save_checkpoint(), which any number of ranks can load"
        )


class OneRankState:
    """What one rank saved, read by a rank of any job."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self._saved = state_dict["thinwire"]
        self._state: Mapping[int, Mapping[str, Tensor]] = state_dict["state"]
        self._number_of = {name: number for number, name in enumerate(self.counters().get("names", ()))}
        slices = [SavedSlice(*one) for one in self._saved["slices"]]
        self._beside = OwnSlices(self.world_size, self.counters(), slices, self._saved["rank_tensors"])

    @property
    def world_size(self) -> int:
        """Count the ranks that saved."""
        return int(self._saved["size"])

    @property
    def rank(self) -> int:
        """Who saved it."""
        return int(self._saved["rank"])

    def counters(self) -> dict[str, Any]:
        """Read plain values, the same on every rank."""
        counters: dict[str, Any] = self._saved["counters"]
        return counters

    def kinds(self) -> set[str]:
        """List the kinds that were saved of a name."""
        return self._beside.kinds() | {kind for entry in self._state.values() for kind in entry}

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """Read a run of values."""
        entry = self._state.get(self._number_of.get(name, -1), {})
        if kind in entry:
            return entry[kind].reshape(-1)[start : start + numel].cpu()
        return self._beside.read(kind, name, start, numel)

    def read_rank(self, key: str, rank: int) -> Tensor:
        """Read what belonged to one rank."""
        if rank != self.rank:
            raise KeyError(f"{key} of rank {rank} is not in the state of rank {self.rank}")
        kind, _, name = key.partition(".")
        entry = self._state.get(self._number_of.get(name, -1), {})
        return entry[kind].reshape(-1).cpu() if kind in entry else self._beside.read_rank(key, rank)


class _Gathered(OneRankState):
    """What every rank of this job gave, each its own file: whole, wherever state lay. Ranks' own tensors stay
    theirs."""

    def __init__(self, comm: Communicator, state_dict: Mapping[str, Any]) -> None:
        super().__init__(state_dict)
        step = self.counters().get("step")
        everyone = _exchange(comm, {"rank": self.rank, "step": step, "slices": self._saved["slices"]})
        ranks, steps = [one["rank"] for one in everyone], [one["step"] for one in everyone]
        if ranks != list(range(comm.size)):
            raise ValueError(
                f"the ranks of this job were given the states of ranks {ranks}: every rank has to load the file that "
                "it saved itself, as each holds other slices"
            )
        if len(set(steps)) > 1:
            raise ValueError(f"the ranks were given states after steps {steps}: load what all of them saved at once")
        self._slices: dict[tuple[str, str], list[SavedSlice]] = {}
        for one in everyone:
            for saved_slice in (SavedSlice(*entry) for entry in one["slices"]):
                self._slices.setdefault((saved_slice.kind, saved_slice.name), []).append(saved_slice)

    @override
    def kinds(self) -> set[str]:
        return super().kinds() | {kind for kind, _ in self._slices}

    @override
    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        slices = sorted(self._slices.get((kind, name), []), key=lambda saved_slice: saved_slice.start)
        if not slices:
            return super().read(kind, name, start, numel)
        whole = torch.cat([saved_slice.tensor.cpu() for saved_slice in slices])
        first = start - slices[0].start
        if first < 0 or first + numel > len(whole):
            raise KeyError(f"elements {start} to {start + numel} of {kind} of {name} were not saved")
        return whole[first : first + numel]


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
