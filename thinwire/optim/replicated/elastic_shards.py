"""Optimizer state that workers who come and go divide: each parameter's lies on two of them, an owner and its buddy,
who both step it, from the averages that all have, so that it outlives either. The owner sends the new weights to all.

Of a step that a death cuts short in that last part, some survivors may have all weights and go on, of whom one gives
them to the others; or none has, and all send what they have stepped once more. Between two steps state moves to where
the death, or a newcomer, has left too little of it, unless one of the workers has gone on already: then a step later.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm.elastic import MembershipError, until_done
from thinwire.comm.membership import Generation, Record
from thinwire.optim.elastic_job import StepPhase, first_and_late, positions
from thinwire.optim.replicated.elastic_buckets import Arrival
from thinwire.optim.replicated.elastic_workers import ElasticWorkers
from thinwire.optim.replicated.torch_steps import TorchSteps
from thinwire.zero.rank_checks import broadcast_from_rank_0
from thinwire.zero.saved_state import SavedSlice, SliceSource, read_state, state_slices


def divide(holds: Sequence[set[int]], sizes: Sequence[int]) -> list[set[int]]:
    """Which parameters, of so many elements, each worker is to hold, now that it `holds` these: each is to lie on two,
    about as much on all workers, and as little is to move as may be."""
    found = [set(one) for one in holds]
    loads = [sum(sizes[number] for number in one) for one in found]

    def move(number: int, source: int | None, target: int | None) -> None:
        for worker, change in ((source, -1), (target, 1)):
            if worker is not None:
                (found[worker].remove if change < 0 else found[worker].add)(number)
                loads[worker] += change * sizes[number]

    for number in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        while (count := sum(number in one for one in found)) != min(2, len(found)):
            among = [worker for worker, one in enumerate(found) if (number in one) is (count > 2)]
            if count > 2:
                move(number, max(among, key=loads.__getitem__), None)
            else:
                move(number, None, min(among, key=loads.__getitem__))
    while True:
        most, least = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[most] - loads[least]
        movable = [one for one in sorted(found[most] - found[least]) if sizes[one] < gap]
        if not movable or gap * len(loads) < 0.05 * sum(loads):
            return found
        move(min(movable, key=lambda one: abs(gap - 2 * sizes[one])), most, least)


class ShardedWorkers(ElasticWorkers):
    """ElasticWorkers that divide the state of TorchSteps."""

    def __init__(self, elastic: Any, options: Any, layout: Any, *others: Any) -> None:
        self._layout = layout
        self._sizes = [max(1, one.numel() if one.requires_grad else 0) for one in layout.table.parameters]
        assert self._steps.shares is not None
        self._shares = self._steps.shares
        self._shares.publish = self._publish
        self._published, self._settled, self._settled_elsewhere = 0, -1, -1
        self._holds: list[set[int]] = []  # of each of the workers
        self._is_divided = False  # as `divide` has it
        self._given: list[Tensor] | None = None  # weights after the step that is being applied
        super().__init__(elastic, options, layout, *others)

    @property
    def _steps(self) -> TorchSteps:
        steps = self._layout.groups[0].algorithm
        assert isinstance(steps, TorchSteps)
        return steps

    # One step

    @override
    def _take(self, arrival: Arrival) -> None:
        super()._take(arrival)
        self._given = None

    def _publish(self, moved: Sequence[int]) -> None:
        """Have the new weights of parameters from their owners. Collective of those who have not had them."""
        weights = self._table.weights()
        for number, values in until_done(lambda: self._gather(moved, weights), self._meet):
            weights[number].copy_(values.view(weights[number].shape))
        self._published, self._given = self._brought, None

    def _gather(self, moved: Sequence[int], weights: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        if self._given is not None:
            return list(enumerate(self._given))
        sent, found = [], list[tuple[int, Tensor]]()
        for owner, numbers in self._by_holder(moved):
            flat, sizes = [weights[one].reshape(-1) for one in numbers], [weights[one].numel() for one in numbers]
            values = torch.cat(flat) if owner == self._group.rank else flat[0].new_empty(sum(sizes))
            sent.append(self._group.broadcast(values, owner, async_op=True))
            found += zip(numbers, torch.split(values, sizes), strict=True)
        for one in sent:
            one.wait()
        return found

    def _by_holder(self, parameters: Iterable[int]) -> list[tuple[int, list[int]]]:
        """One of the workers that hold each, and which of these `parameters` it sends."""
        found: dict[int, list[int]] = {}
        for number in parameters:
            holders = [worker for worker, one in enumerate(self._holds) if number in one]
            found.setdefault(holders[number % len(holders)], []).append(number)
        return sorted(found.items())

    # Between steps

    @override
    def _go_on(self) -> None:
        until_done(self._divide, self._meet)
        self._settled = self._brought
        super()._go_on()

    def _divide(self) -> None:
        if self._is_divided or self._brought <= self._settled_elsewhere:
            return
        if (wanted := divide(self._holds, self._sizes)) != self._holds:
            self._move_state(wanted)
        self._is_divided = True

    def _move_state(self, wanted: list[set[int]]) -> None:
        """Have all workers hold what they are to. Collective."""
        me = self._group.rank
        for target, (holds, wants) in enumerate(zip(self._holds, wanted, strict=True)):
            for source, numbers in self._by_holder(sorted(wants - holds)):
                if me in (source, target):
                    self._move_between(source, target, numbers)
        self._group.barrier()  # nothing is given up before it has arrived
        for number in self._shares.mine - wanted[me]:
            self._steps.set_state(number, {})
        self._holds, self._shares.mine = wanted, set(wanted[me])

    def _move_between(self, source: int, target: int, numbers: Sequence[int]) -> None:
        file = io.BytesIO()
        with self._among([source, target], f"state of {source} for {target}") as group:
            if group.rank == 0:
                torch.save({number: self._steps.state_of(number) for number in numbers}, file)
            size = int(group.all_gather_bytes(str(file.tell()).encode(), "move state")[0])
            values = torch.frombuffer(bytearray(file.getvalue() or size), dtype=torch.uint8)
            group.broadcast(values)
        if group.rank:
            found = torch.load(io.BytesIO(values.numpy().tobytes()), map_location=self._place, weights_only=True)
            for number, state in found.items():
                self._steps.set_state(number, state)
                self._shares.mine.add(number)

    def _place(self, storage: Any, where: str) -> Any:
        return storage if where == "cpu" else storage.to(device=self._table.parameters[0].device)

    # Meetings

    @override
    def _stand(self) -> Record | None:
        record = super()._stand()
        if record is None:
            return None
        if not self._brought and not self._begins_at:  # no worker has state yet
            self._shares.mine = set(range(len(self._sizes)))
        there = self._phase is not StepPhase.APPLYING or self._published == self._brought or self._given is not None
        held = f"{sum(1 << number for number in self._shares.mine):x}"
        return {**record, "published": self._brought - (not there), "settled": self._settled, "held": held}

    @override
    def _join(self, generation: Generation) -> None:
        said = positions(generation)
        every, workers = range(len(self._sizes)), range(len(generation.entries))
        masks = [int(said[worker].held, 16) if worker in said else 0 for worker in workers]
        holds = [{number for number in every if mask >> number & 1} for mask in masks]
        if not said:
            holds = [set(every) for _ in workers]
        elif lost := set(every) - set().union(*holds):
            self.membership.leave()
            raise MembershipError(self._why_lost(lost))
        super()._join(generation)
        self._shares.mine = set(holds[generation.index])  # not what its donor holds, which a newcomer has been told
        self._is_divided = False
        self._holds, self._settled_elsewhere = holds, max((one.settled for one in said.values()), default=-1)

    def _why_lost(self, lost: set[int]) -> str:
        """Who held what no survivor does; of the last generation, whose names `_names_now` has."""
        held_by = dict[str, list[int]]()
        for number in sorted(lost):
            names = zip(self._names_now, self._holds, strict=True)
            held_by.setdefault(" and ".join(name for name, one in names if number in one), []).append(number)
        told = [
            f"that of {len(numbers)} parameters, {self._table.names[numbers[0]]!r} first, by {names or 'none before'}"
            for names, numbers in held_by.items()
        ]
        if not self._brought:
            return f"no worker has loaded {'; '.join(told)}: load on each what it saved, on all workers of a new job"
        return (
            f"optimizer state is lost, as all are gone that held it: {'; '.join(told)}. Start a new job, from the last "
            "checkpoint"
        )

    @override
    def _share_step(self, generation: Generation) -> None:
        super()._share_step(generation)
        members, said = first_and_late(generation, lambda one: one.published), positions(generation).values()
        if not members or max(one.published for one in said) < max(one.brought for one in said):
            return
        with self._among(members, "weights") as group:
            weights = self._table.weights() if self._given is None else self._given
            values = weights if group.rank == 0 else list(map(torch.empty_like, weights))
            broadcast_from_rank_0(group, values)
        if group.rank:
            self._given = values

    # Newcomers, who get state when the others divide it anew, and what a checkpoint has of it

    @override
    def _look_on(self) -> None:
        """Join at a meeting: steps cannot be followed without state."""

    @override
    def own_slices(self) -> list[SavedSlice]:
        found: list[SavedSlice] = []
        for number in sorted(self._shares.mine):
            shape, numel = self._table.parameters[number].shape, self._table.parameters[number].numel()
            state = {
                kind: one.reshape(-1) if isinstance(one, Tensor) and one.shape == shape else one
                for kind, one in self._steps.state_of(number).items()
            }
            found += state_slices(state, self._table.names[number], 0, slice(None), numel)
        return found

    @override
    def begin_at(self, state: str, source: SliceSource) -> None:
        for number in self._shares.mine:
            numel = self._table.parameters[number].numel()
            self._steps.set_state(number, read_state(source, self._table.names[number], 0, numel))
        self._settled = -1
        super().begin_at(state, source)
