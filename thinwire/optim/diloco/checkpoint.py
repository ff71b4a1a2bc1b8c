"""Checkpoints of local updates: outer weights and momentum by their owners; each worker's own replica, inner state and
residual, of which another number of workers takes the means."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.optim.diloco.fragments import Correlation, Fragment, Guard, OuterOptimizer, Piece, Told
from thinwire.optim.diloco.outer import Arrived, OuterState, UnderWay
from thinwire.optim.diloco.outer_weights import OuterWeights
from thinwire.optim.diloco.worker import Worker
from thinwire.optim.home import ranks_to_resume
from thinwire.zero.rank_state import warn_of_lost_residuals
from thinwire.zero.saved_state import (
    Count,
    Counters,
    DamagedStateError,
    SavedSlice,
    SliceSource,
    check_saved,
    mean_over_ranks,
    read_weight,
)

_WORKER_RESIDUAL = "worker_residual"
_OWNER_RESIDUAL = "owner_residual"
OUTER_MOMENTUM = "outer_momentum"
_ARRIVING = "arriving"
_REPLICA = "replica"
_COMMON = "common"
_INNER = "inner."
_DEPARTED = "departed"
_TOLD = "told"


class SavedPlace(BaseModel):
    """Where a worker was among the workers of the job that saved: number `place` of `workers`. `owned`: where what it
    owned of each fragment began and ended; `claimed`: samples that the job had given out; `taken`: outer steps."""

    model_config = ConfigDict(strict=True, extra="forbid")

    place: Count
    workers: Count
    owned: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]
    claimed: Count
    taken: Count


class SavedShare(BaseModel):
    """State that workers share: of which `parameters`, and whether it is nowhere below 0."""

    model_config = ConfigDict(strict=True, extra="forbid")

    parameters: list[Count]
    positive: bool


class LocalCounters(Counters):
    """Of local updates; `lr` and `momentum` of the outer optimizer."""

    names: list[str]
    nodes: list[int] | None
    step: Count
    met_at: Count
    inner_kinds: list[str]
    shape: list[Count]
    under_way: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]
    arriving: list[Annotated[list[str | Count], Field(min_length=3, max_length=4)]]
    lr: float
    momentum: float
    shared: dict[str, SavedShare] = Field(default_factory=dict)
    elastic: SavedPlace | None = None


@dataclass(frozen=True)
class LocalCheckpoint:
    """What is saved of a worker and of its fragments, and how it is taken up again.

    `nodes`: the node of each rank, where nodes are the workers. `shape`: what has to be alike for fragments to go on
    in flight. `shared`: state that workers share, by kind.
    """

    comm: Communicator
    nodes: list[int] | None
    worker: Worker
    names: Sequence[str]
    fragments: Sequence[Fragment]
    outer_steps: Sequence[OuterState]
    weights: OuterWeights
    shape: Sequence[int]
    shared: Mapping[str, tuple[list[int], bool]]
    outer: OuterOptimizer
    guards: Sequence[Guard | None]

    def slices(self, under_way: Sequence[UnderWay]) -> list[SavedSlice]:
        """What this rank owns of the outer weights, momentum and residuals, and of what is in flight."""
        found: list[SavedSlice] = []
        arriving = {one.fragment: one.arrived for one in under_way}
        for number, (fragment, outer_step) in enumerate(zip(self.fragments, self.outer_steps, strict=True)):
            if outer_step.alike and self.comm.rank:
                continue
            own = slice(outer_step.own.start, min(outer_step.own.stop, fragment.numel))
            outer = self.weights.outer(number)
            flat = {OUTER_MOMENTUM: outer_step.momentum, _OWNER_RESIDUAL: outer_step.owner_residual}
            arrived = arriving.get(number)
            for piece, place in fragment.overlaps(own):
                name, start = self.names[piece.parameter], piece.start + place.start - piece.offset
                dtype = self.worker.parameters[piece.parameter].dtype
                if fragment.kind:
                    found.append(SavedSlice(_of(fragment.kind, _COMMON), name, start, outer[place]))
                else:
                    found.append(SavedSlice("weight", name, start, outer[place].to(dtype)))
                if dtype != torch.float32 and not fragment.kind:
                    found.append(SavedSlice("master", name, start, outer[place]))
                within = slice(place.start - own.start, place.stop - own.start)
                kept = ((_of(fragment.kind, kind), one) for kind, one in flat.items() if one is not None)
                found += [SavedSlice(kind, name, start, one[within]) for kind, one in kept]
                if arrived is not None and arrived.update is not None:
                    found.append(SavedSlice(_of(fragment.kind, _ARRIVING), name, start, arrived.update[place]))
        return found

    def rank_tensors(self, under_way: Sequence[UnderWay]) -> dict[str, Tensor]:
        """This worker's own: its replica of the weights, its inner state, its residual, what is kept of a fragment
        in flight."""
        found = {f"{_INNER}{kind}.{name}": one for (kind, name), one in self.worker.saved(self.names).items()}
        replica = self._whole("", self.weights.replica, torch.float32)
        found |= {f"{_REPLICA}.{name}": values for name, values in replica.items()}
        if kept := [one.worker_residual for one in self.outer_steps if one.worker_residual is not None]:
            for kind in ("", *self.shared):
                residual = self._whole(kind, self._residual, kept[0].dtype)
                found |= {f"{_of(kind, _WORKER_RESIDUAL)}.{name}": values for name, values in residual.items()}
        for one in under_way:
            if one.departed is not None:
                found[f"{_DEPARTED}.{one.fragment}"] = one.departed
            if one.arrived is not None and one.arrived.told is not None:
                found[f"{_TOLD}.{one.fragment}"] = one.arrived.told.tensor()
        return found | {key: one.known for key, one in self.histories.items()}

    def counters(self, step: int, met_at: int, under_way: Sequence[UnderWay]) -> dict[str, Any]:
        """Where the run is."""
        kinds = {kind for kind, _ in self.worker.saved(self.names)}
        return {
            "names": list(self.names),
            "nodes": self.nodes,
            "step": step,
            "met_at": met_at,
            "inner_kinds": sorted(kinds),
            "shape": list(self.shape),
            "under_way": [[one.fragment, one.left_at] for one in under_way],
            "arriving": [
                [self.names[piece.parameter], piece.start, piece.numel, *([kind] if kind else [])]
                for one in under_way
                if one.arrived is not None and one.arrived.update is not None
                for kind in [self.fragments[one.fragment].kind]
                for piece in self.fragments[one.fragment].pieces
            ],
            "shared": {kind: {"parameters": list(n), "positive": one} for kind, (n, one) in self.shared.items()},
        }

    def check(self, source: SliceSource) -> None:
        """Raise DamagedStateError unless all was saved that `load` reads."""
        saved, ranks = source.counters(), ranks_to_resume(source, self.comm, self.nodes)
        numels = {self.names[one.parameter]: 0 for fragment in self.fragments for one in fragment.pieces}
        for name in numels:
            numels[name] = self.worker.parameters[self.names.index(name)].numel()
            if source.dtype_of("master", name) is None:
                check_saved(source, "weight", name)
            check_saved(source, OUTER_MOMENTUM, name)
            for rank in ranks or ():
                if f"{_REPLICA}.{name}" not in source.rank_keys(rank):
                    raise DamagedStateError(f"it lacks the weights {name!r} of rank {rank}")
        for name, start, numel, *kind in saved["arriving"]:
            if not isinstance(name, str) or start + numel > numels.get(name, 0):
                raise DamagedStateError(f"what was in flight of {name!r} is no part of a parameter here")
            check_saved(source, _of("".join(kind), _ARRIVING), name)
        for kind, one in saved.get("shared", {}).items():
            if not all(number < len(self.names) and self.names[number] in numels for number in one["parameters"]):
                raise DamagedStateError(f"{kind!r} is shared of parameters that do not train here")
            for number in one["parameters"]:
                check_saved(source, _of(kind, _COMMON), self.names[number])
        if saved["shape"] == list(self.shape) and any(one >= len(self.fragments) for one, _ in saved["under_way"]):
            raise DamagedStateError(f"there are {len(self.fragments)} fragments, and others were in flight")

    def load(self, source: SliceSource) -> tuple[int, int, list[UnderWay]]:
        """Take over what another run saved: the step, the step at which workers last met, and what is in flight."""
        saved, ranks = source.counters(), ranks_to_resume(source, self.comm, self.nodes)
        if ranks is None and self.outer_steps:
            warn_of_lost_residuals(source, self.comm)
        goes_on = saved["shape"] == list(self.shape)
        updates = self._read_updates(source, saved["arriving"])
        for number, (fragment, outer_step) in enumerate(zip(self.fragments, self.outer_steps, strict=True)):
            replica = None  # of state, which comes with the inner optimizer
            if fragment.kind:
                outer = self.read_flat(source, _of(fragment.kind, _COMMON), fragment)
                assert outer is not None, "check() has found it"
            else:
                outer = torch.cat([self._read_weight(source, piece) for piece in fragment.pieces])
                replica = outer if ranks is None else self._mean(source, _REPLICA, ranks, fragment)
            self._load_outer_step(source, fragment, outer_step, ranks)
            if not goes_on:  # with other fragments nothing can go on in flight: it is taken in now
                for piece in fragment.pieces:
                    if (fragment.kind, piece.parameter) in updates:
                        whole = updates[fragment.kind, piece.parameter]
                        update = whole[piece.start : piece.start + piece.numel]
                        outer[piece.offset : piece.offset + piece.numel] -= update
            self.weights.set(number, outer, replica)
        first = (ranks or (0,))[0]
        keys = source.rank_keys(first) if goes_on and ranks else ()
        for key, history in self.histories.items():
            history.reset()
            if key in keys:
                history.known.copy_(source.read_rank(key, first))
        self._load_inner(source, saved["inner_kinds"], ranks)
        under_way = []
        for number, left_at in saved["under_way"] if goes_on else ():
            settings = self.outer.of(number, self.fragments[number].kind)
            departed, told = f"{_DEPARTED}.{number}", f"{_TOLD}.{number}"
            arrived = self._arrived(number, updates)
            if told in keys:
                arrived = replace(arrived, told=Told.read(source.read_rank(told, first)))
            one = UnderWay(number, left_at, settings, True, arrived)
            if departed in keys:
                one.departed = mean_over_ranks(source, departed, ranks or ()).to(self.weights.outer(number).device)
            under_way.append(one)
        return saved["step"], saved["met_at"], under_way

    def load_weights(self, source: SliceSource) -> None:
        """Take over the weights alone, for all workers."""
        for number, fragment in enumerate(self.fragments):
            if not fragment.kind:
                outer = torch.cat([self._read_weight(source, piece) for piece in fragment.pieces])
                self.weights.set(number, outer, outer)

    @property
    def histories(self) -> dict[str, Correlation | Guard]:
        """What fragments' outer steps so far tell, by the key under which it is saved."""
        found: dict[str, Correlation | Guard] = {}
        found |= {f"correlation.{number}": one for number, one in enumerate(self.outer.correlations)}
        return found | {f"guard.{number}": one for number, one in enumerate(self.guards) if one is not None}

    def _read_updates(self, source: SliceSource, arriving: Sequence[Sequence[Any]]) -> dict[tuple[str, int], Tensor]:
        """What was in flight, by kind of state and the parameter's number, zeros in what was not; `arriving`: (name,
        start, elements), and a kind of state."""
        number_of = {name: number for number, name in enumerate(self.names)}
        found: dict[tuple[str, int], Tensor] = {}
        for name, start, numel, *kinds in arriving:
            kind = "".join(kinds)
            key, values = (kind, number_of[name]), source.read(_of(kind, _ARRIVING), name, start, numel)
            if key not in found:  # in fp64 where the worker was alone
                found[key] = torch.zeros_like(self.worker.weights(key[1]), dtype=values.dtype)
            found[key][start : start + numel] = values
        return found

    def _arrived(self, number: int, updates: Mapping[tuple[str, int], Tensor]) -> Arrived:
        fragment = self.fragments[number] if number < len(self.fragments) else Fragment(())
        parts = [(updates.get((fragment.kind, one.parameter)), one) for one in fragment.pieces]
        known = [whole[one.start : one.start + one.numel] for whole, one in parts if whole is not None]
        return Arrived(torch.cat(known) if known and len(known) == len(parts) else None)

    def _load_outer_step(
        self, source: SliceSource, fragment: Fragment, outer_step: OuterState, ranks: Sequence[int] | None
    ) -> None:
        outer_step.reset()
        own = outer_step.own
        for kind, one in ((OUTER_MOMENTUM, outer_step.momentum), (_OWNER_RESIDUAL, outer_step.owner_residual)):
            values = None if one is None else self.read_flat(source, _of(fragment.kind, kind), fragment)
            if one is not None and values is not None:
                part = values[own.start : own.stop]
                one[: part.numel()].copy_(part)
        residual, place = outer_step.worker_residual, outer_step.worker_place
        if ranks is not None and residual is not None:
            try:
                kind = _of(fragment.kind, _WORKER_RESIDUAL)
                part = self._mean(source, kind, ranks, fragment)[place.start : place.stop]
            except KeyError:  # it was saved by a worker alone, which loses nothing
                return
            residual[: part.numel()].copy_(part)

    def _load_inner(self, source: SliceSource, kinds: Sequence[str], ranks: Sequence[int] | None) -> None:
        if ranks is None:
            warnings.warn(
                "the inner optimizer's state begins anew: it was saved by other nodes, whose ranks shared it",
                RuntimeWarning,
                stacklevel=6,
            )
            self.worker.reset_state()
            return

        def read(key: str) -> Tensor:
            values = [source.read_rank(_INNER + key, rank) for rank in ranks]
            if len(values) == 1:
                return values[0]
            if not values[0].is_floating_point() or values[0].numel() == 1:  # a count of steps
                return torch.stack(values).amax(0)
            return torch.stack(values).float().mean(0).to(values[0].dtype)

        self.worker.load(self.names, kinds, read)

    def _read_weight(self, source: SliceSource, piece: Piece) -> Tensor:
        device = self.worker.parameters[0].device
        values = read_weight(source, torch.float32, self.names[piece.parameter], piece.start, piece.numel)
        return values.to(device, torch.float32)

    def read_flat(self, source: SliceSource, kind: str, fragment: Fragment) -> Tensor | None:
        """A kind of value of a whole fragment; None where it was not saved of some of it."""
        try:
            values = [source.read(kind, self.names[one.parameter], one.start, one.numel) for one in fragment.pieces]
        except KeyError:
            return None
        return torch.cat(values).to(self.worker.parameters[0].device)

    def _mean(self, source: SliceSource, kind: str, ranks: Sequence[int], fragment: Fragment) -> Tensor:
        """The mean over `ranks` of their own values of a fragment."""
        names = {one.parameter: self.names[one.parameter] for one in fragment.pieces}
        read = {number: mean_over_ranks(source, f"{kind}.{name}", ranks) for number, name in names.items()}
        flat = [read[one.parameter][one.start : one.start + one.numel] for one in fragment.pieces]
        return torch.cat(flat).to(self.worker.parameters[0].device)

    def _residual(self, number: int) -> Tensor:
        """The worker's residual of a fragment, zeros where another rank of the node has it."""
        fragment, outer_step = self.fragments[number], self.outer_steps[number]
        place, residual = outer_step.worker_place, outer_step.worker_residual
        whole = torch.zeros(max(fragment.numel, place.stop), device=self.worker.parameters[0].device)
        if residual is not None:
            whole[place].copy_(residual)
        return whole[: fragment.numel]

    def _whole(self, kind: str, read: Callable[[int], Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Values of a kind that `read` gives of each fragment as whole parameters, by name."""
        device = self.worker.parameters[0].device
        of_kind = self.shared[kind][0] if kind else range(len(self.names))
        found = {
            self.names[number]: torch.zeros(self.worker.parameters[number].numel(), dtype=dtype, device=device)
            for number in of_kind
            if self.worker.parameters[number].requires_grad
        }
        for number, fragment in enumerate(self.fragments):
            values = read(number) if fragment.kind == kind else None
            for one in () if values is None else fragment.pieces:
                name = self.names[one.parameter]
                found[name][one.start : one.start + one.numel] = values[one.offset : one.offset + one.numel]  # type: ignore[index]
        return found


def _of(kind: str, role: str) -> str:
    """What a role of shared state of a kind is called; of weights as it is."""
    return f"{role}.{kind}" if kind else role


ELASTIC = "elastic"
"""The key of what only elastic workers count."""
