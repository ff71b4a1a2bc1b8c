"""What a worker of an elastic job saves and takes up again: all that the workers have in common, and what is its own.

A worker's checkpoint is whole, so that any of a job's workers can be left away, as if it had died, and others added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.optim.diloco.checkpoint import LocalCheckpoint
from thinwire.optim.diloco.fragments import Fragment
from thinwire.optim.diloco.kept_momentum import KeptMomentum
from thinwire.optim.diloco.outer import OuterState, UnderWay
from thinwire.zero.saved_state import SliceSource

__all__ = ["ELASTIC", "Loaded", "SavedPlace", "load_worker", "saved_states"]

ELASTIC = "elastic"
"""The key of what only elastic workers count."""

MakeCheckpoint = Callable[[Sequence[OuterState]], LocalCheckpoint]


class _HeldState(OuterState):
    """An outer step's state by itself."""

    def __init__(
        self, own: slice, momentum: Tensor, worker_place: slice, worker: Tensor | None, owner: Tensor | None
    ) -> None:
        self.own = own
        self.momentum = momentum
        self._worker_place = worker_place
        self._worker_residual = worker
        self._owner_residual = owner

    @property
    def worker_place(self) -> slice:
        """See OuterState."""
        return self._worker_place

    @property
    def worker_residual(self) -> Tensor | None:
        """See OuterState."""
        return self._worker_residual

    @property
    def owner_residual(self) -> Tensor | None:
        """See OuterState."""
        return self._owner_residual


@dataclass(frozen=True)
class SavedPlace:
    """Where a worker was among the workers of the job that saved: number `place` of `workers`. `owned`: where what it
    owned of each fragment began and ended; `claimed`: samples that the job had given out; `taken`: outer steps."""

    place: int
    workers: int
    owned: list[list[int]]
    claimed: int
    taken: int

    def name(self, step: int) -> str:
        """What tells the saved run apart from others."""
        return f"{self.workers} workers after step {step} and {self.taken} outer steps"


def saved_states(
    fragments: Sequence[Fragment], states: Sequence[OuterState], momentum: KeptMomentum, *, leads: bool
) -> list[OuterState]:
    """Of each fragment what this worker can save as if it owned all of it; of a node its first rank."""
    found: list[OuterState] = []
    for number, (fragment, state) in enumerate(zip(fragments, states, strict=True)):
        if not leads:
            found.append(state)
            continue
        place = slice(state.own.start, min(state.own.stop, fragment.numel))
        numel = max(0, place.stop - place.start)
        whole = momentum.of(number).clone()
        whole[place] = state.momentum[:numel]
        residual = None
        if state.owner_residual is not None:
            residual = torch.zeros_like(whole)
            residual[place] = state.owner_residual[:numel]
        held = _HeldState(slice(0, fragment.numel), whole, state.worker_place, state.worker_residual, residual)
        found.append(held)
    return found


@dataclass(frozen=True)
class Loaded:
    """A worker as it was saved: `states` of the outer steps, `steps`, `under_way`; `place`: see SavedPlace; `run`: what
    tells the saved run apart from others."""

    states: list[OuterState]
    steps: int
    under_way: list[UnderWay]
    place: SavedPlace | None
    run: str


def load_worker(source: SliceSource, take_up: MakeCheckpoint, momentum: KeptMomentum, *, leads: bool) -> Loaded:
    """Take up what a worker saved, `momentum` included, which the first rank of a node has; `take_up`: a checkpoint of
    the worker with these states."""
    counted = source.counters()
    place = None if ELASTIC not in counted else SavedPlace(**counted[ELASTIC])
    form = take_up([])
    as_cut = counted["shape"] == list(form.shape)
    owned = place.owned if place is not None and as_cut else [[0, one.numel] for one in form.fragments]
    device = form.worker.parameters[0].device
    states = [
        _state_to_load(one.numel if leads else 0, part, device) for one, part in zip(form.fragments, owned, strict=True)
    ]
    steps, _, under_way = take_up(states).load(source)
    for number, fragment in enumerate(form.fragments if leads else ()):
        values = form.read_momentum(source, fragment)
        if values is not None:
            momentum.of(number).copy_(values)
    run = f"step {steps}" if place is None else place.name(steps)
    return Loaded(states, steps, under_way, place, run)


def _state_to_load(numel: int, owned: Sequence[int], device: torch.device) -> OuterState:
    """What takes up momentum and residuals of a fragment, of which a worker owned the elements `owned`."""
    own = slice(min(owned[0], numel), min(owned[1], numel))
    momentum, owner = (torch.zeros(own.stop - own.start, device=device) for _ in range(2))
    return _HeldState(own, momentum, slice(0, numel), torch.zeros(numel, dtype=torch.bfloat16, device=device), owner)
