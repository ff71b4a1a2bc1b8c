"""Meetings of elastic workers: whose state counts, who lacks what of it and gets it, and in which order they go on; and
what each saves and takes up again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from thinwire.comm.elastic import MembershipError
from thinwire.comm.membership import Record
from thinwire.comm.relay import WorkerGroup
from thinwire.optim.diloco.checkpoint import ELASTIC, OUTER_MOMENTUM, LocalCheckpoint, SavedPlace
from thinwire.optim.diloco.fragments import Fragment
from thinwire.optim.diloco.outer import OuterState, UnderWay
from thinwire.optim.diloco.outer_weights import KeptMomentum, SharedStates
from thinwire.zero.saved_state import SliceSource


@dataclass(frozen=True)
class Standing:
    """Where a worker is.

    `taken`: outer steps taken. `arrived`: how many after these are here, and not taken in yet. `steps`: its own.
    `dropped`: the last outer steps that were not taken as weights were not finite. `place`: its number among all.
    `checkpoint`: what tells the run apart from which the job was resumed, empty where it was not. `resumes`: how many
    workers that run had, on a worker that has just loaded its part; else 0. `claimed`: samples that run had given out.
    """

    taken: int = 0
    arrived: int = 0
    steps: int = 0
    dropped: list[int] = field(default_factory=list)
    place: int = 0
    checkpoint: str = ""
    resumes: int = 0
    claimed: int = 0


@dataclass(frozen=True)
class Plan:
    """How a generation's workers go on, by their numbers in the generation.

    `standings`: None of those that have nothing of the job. `order`: in which they go on. `source`: who hands over what
    the workers `lacking` lack. `as_saved`: all of a saved run's workers have come back, with the same outer steps in
    flight; else what has arrived on a worker counts as taken, and has to be taken in first.
    """

    standings: tuple[Standing | None, ...]
    order: tuple[int, ...]
    source: int
    lacking: tuple[int, ...]
    as_saved: bool

    @classmethod
    def of(cls, records: Sequence[Record | None]) -> Plan:
        """From what all have said. Raises MembershipError where they have loaded what was not saved at once."""
        said = [None if record is None else Standing(**record) for record in records]
        checkpoints = sorted({one.checkpoint for one in said if one is not None and one.checkpoint})
        if len(checkpoints) > 1:
            raise MembershipError(
                f"workers have loaded states of different runs or steps: {' and '.join(checkpoints)}. Load what all of "
                "a job's workers saved after the same step, in a new job"
            )
        # What was loaded counts, and what began before a worker loaded it does not.
        kept = [
            one if not checkpoints or (one is not None and one.checkpoint == checkpoints[0]) else None for one in said
        ]
        resuming = [one.place for one in kept if one is not None and one.resumes]
        if len(set(resuming)) < len(resuming):
            raise MembershipError(
                f"workers have loaded the states of workers {sorted(resuming)}: each loads a file of its own, and a "
                "worker without one loads nothing"
            )
        as_saved = all(one is not None and one.resumes == len(kept) and one.taken == kept[0].taken for one in kept)  # type: ignore[union-attr]
        if not as_saved:
            kept = [None if one is None else replace(one, taken=one.taken + one.arrived, arrived=0) for one in kept]
        taken = [-1 if one is None else one.taken for one in kept]
        source = max(range(len(kept)), key=lambda number: (taken[number], -number))
        lacking = tuple(number for number in range(len(kept)) if number != source and taken[number] < taken[source])
        if taken[source] < 0:  # a job's beginning
            lacking = tuple(range(1, len(kept)))
        place = [0 if one is None else one.place for one in kept]
        order = sorted(range(len(kept)), key=lambda number: (taken[number] < 0, place[number], number))
        return cls(tuple(kept), tuple(order), source, lacking, as_saved)

    @property
    def top(self) -> int:
        """Outer steps that all have taken in the end."""
        return self.of_source.taken

    @property
    def of_source(self) -> Standing:
        """Where the source is."""
        return self.standings[self.source] or Standing()

    @property
    def claimed(self) -> int:
        """Samples that the run had given out from which this one was resumed, as far as any worker knows."""
        return max((one.claimed for one in self.standings if one is not None), default=0)

    @property
    def steps(self) -> int:
        """At which step a worker begins that has nothing of the job."""
        return min((one.steps for one in self.standings if one is not None), default=0)


def _hand_over_state(group: WorkerGroup, plan: Plan, me: int, names: Sequence[str], shared: SharedStates) -> None:
    """Have workers that have nothing share what the source does, with the inner optimizer's state that it has; what is
    in common of it follows. Collective of the source and of those who lack something."""
    worker = shared.weights.worker
    mine = worker.whole_state(names) if me == plan.source and shared.found else {}
    forms = [[*key, str(one.dtype).removeprefix("torch."), list(one.shape)] for key, one in mine.items()]
    found, listed = group.gather([shared.found, forms], "share its state")[0]
    given: dict[tuple[str, str], Tensor] = {}
    for kind, name, dtype, shape in listed:
        values = mine[kind, name].cpu() if mine else torch.empty(shape, dtype=getattr(torch, dtype))
        flat = values.reshape(-1)
        group.broadcast(flat, inside=False)
        if group.comm is not None:
            given[kind, name] = flat.view(shape)
    if me != plan.source and plan.standings[me] is None:
        shared.cut({kind: (numbers, positive) for kind, (numbers, positive) in found.items()})
        if listed:
            worker.load_whole(names, given)


def hand_over(
    group: WorkerGroup, plan: Plan, me: int, names: Sequence[str], shared: SharedStates, momentum: KeptMomentum
) -> tuple[dict[int, Tensor], list[Tensor]]:
    """The source's outer weights, of the fragments that a worker lacks, and its momentum if one has nothing; what its
    guards know becomes everybody's. Collective of the source and of those who lack something."""
    if shared.share and None in plan.standings:
        _hand_over_state(group, plan, me, names, shared)
    weights, numbers = shared.weights, range(len(shared.outer_steps))
    lacking = [plan.standings[number] for number in plan.lacking]
    one_begins = None in lacking
    lacks = {shared.fragment(number) for one in lacking if one for number in range(one.taken, plan.top)}
    outer: dict[int, Tensor] = {}
    for fragment in numbers if one_begins else sorted(lacks):
        outer[fragment] = weights.outer(fragment).clone()
        group.broadcast(outer[fragment])
    of_weights = [number for number in numbers if not weights.fragments[number].kind]
    copies = [momentum.of(fragment).clone() for fragment in of_weights] if one_begins else []
    for one in copies:
        group.broadcast(one, inside=False)
    for guard in filter(None, (one.guard for one in shared.outer_steps)):
        known = guard.known.to(weights.outer(0).device)
        group.broadcast(known)
        guard.known.copy_(known)
    group.barrier()  # all have all of it before its sender may go
    return outer, copies


# Checkpoints: each worker's is whole, so that any of a job's can be left away, as if it had died, and others added

MakeCheckpoint = Callable[[Sequence[OuterState]], LocalCheckpoint]


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
        whole = (
            torch.zeros(fragment.numel, device=state.momentum.device) if fragment.kind else momentum.of(number).clone()
        )
        whole[place] = state.momentum[:numel]
        residual = None
        if state.owner_residual is not None:
            residual = torch.zeros_like(whole)
            residual[place] = state.owner_residual[:numel]
        every = slice(0, fragment.numel)
        found.append(OuterState(every, whole, state.worker_place, state.worker_residual, residual))
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
    states = []
    for fragment, part in zip(form.fragments, owned, strict=True):
        numel = fragment.numel if leads else 0
        own = slice(*(min(one, numel) for one in part))
        residual = torch.zeros(numel, dtype=torch.bfloat16, device=device)
        owners = torch.zeros(2, own.stop - own.start, device=device)
        states.append(OuterState(own, owners[0], slice(0, numel), residual, owners[1]))
    steps, _, under_way = take_up(states).load(source)
    for number, fragment in enumerate(form.fragments if leads else ()):
        values = None if fragment.kind else form.read_flat(source, OUTER_MOMENTUM, fragment)
        if values is not None:
            momentum.of(number).copy_(values)
    run = f"step {steps}"
    if place is not None:
        run = f"{place.workers} workers after {run} and {place.taken} outer steps"
    return Loaded(states, steps, under_way, place, run)
