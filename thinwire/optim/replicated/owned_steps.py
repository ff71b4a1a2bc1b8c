"""Parameters with one owner each among workers that come and go, as 1-bit Muon's matrices.

Gradients leave for a parameter's owner and its buddy, the next worker, as the same packets, by which both hold the same
state, and weights of their own, to the bit. The owner's step comes to all as what its weights are ahead of theirs; what
the codec loses of that, the next one has. All else goes through a codec on both legs, and all workers step it alike.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import CommunicationError
from thinwire.comm.membership import Generation
from thinwire.compress.buddies import ExchangeWithBuddies, norm_of_own
from thinwire.optim.bucket import Bucket
from thinwire.optim.options import HomeOptions
from thinwire.optim.replicated.elastic_buckets import Arrival, ElasticSynchronizer
from thinwire.optim.replicated.elastic_shards import ShardedWorkers
from thinwire.optim.replicated.elastic_workers import ElasticWorkers
from thinwire.optim.replicated.synchronizer import Synchronizer
from thinwire.optim.replicated.torch_steps import Build, Groups, Shares, TorchSteps
from thinwire.optim.step import AdamSettings, Clock, Members
from thinwire.zero.rank_checks import agree_on_absent, clip_coefficient
from thinwire.zero.saved_state import group_settings

_OWN = "own_weight"


class OwnedSteps(TorchSteps):
    """The steps of a torch optimizer, in which the parameters `owned` move by what their owners send.

    `clip`: what gradients are multiplied by. `of_other`: averages, flat, by number, of those that this worker is buddy
    for.
    """

    def __init__(self, build: Build, groups: Groups, shares: Shares, owned: Collection[int]) -> None:
        self.owned, self.clip = owned, 1.0
        super().__init__(build, groups, (), shares)

    @override
    def _new_weights(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        self._parameters = parameters
        self._versions: dict[int, int] = {}  # of the parameters that own weights are ahead of
        self.begin_step()
        found = super()._new_weights(parameters)
        for number in self.owned:
            found[number] = found[number].clone()  # what changes it is no change of the parameter
            found[number].data = parameters[number].detach()  # until it is ahead
        return found

    def begin_step(self) -> None:
        """Forget a step that was not taken."""
        self._next: dict[int, tuple[Tensor, dict[str, Any]]] = {}
        self.of_other: dict[int, Tensor] = {}

    def try_step(self, averages: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """What own weights of these parameters are ahead by after a step by `averages`, flat; `move` takes the step."""
        state = self.optimizer.state
        before = {}
        for number in averages:
            own = self._own(number)
            before[number] = own.clone(), copy.deepcopy(state.get(own, {}))
        self._step(averages)
        found = {}
        for number, (values, of_own) in before.items():
            own = self._weights[number]
            found[number] = (own - self._parameters[number].detach()).reshape(-1)
            self._next[number] = own.data, state.pop(own)
            own.data = values
            if of_own:
                state[own] = of_own
        return found

    @override
    def move(self, groups: Sequence[Members], clock: Clock) -> None:
        assert self.shares is not None
        parts = [_those(one, lambda number: number not in self.owned) for one in groups]
        rest = [one for one in parts if one.parameters]
        for members in rest if self.clip < 1.0 else ():
            torch._foreach_mul_(members.averages, self.clip)
        super().move(rest, clock)
        for number, (values, of_own) in self._next.items():
            own = self._weights[number]
            own.data, self.optimizer.state[own] = values, of_own
        for number in self.of_other:
            self._own(number)
        self._step(self.of_other)
        for members in (_those(one, self.owned.__contains__) for one in groups):
            for number, weight, ahead in zip(members.parameters, members.weights, members.averages, strict=True):
                weight.detach().add_(ahead)
                if number in self.shares.mine:
                    self._versions[number] = self._parameters[number]._version
        self.begin_step()

    @override
    def state_of(self, number: int) -> dict[str, Any]:
        own = {_OWN: self._weights[number]} if self._versions.get(number) == self._parameters[number]._version else {}
        return super().state_of(number) | own

    @override
    def set_state(self, number: int, state: Mapping[str, Any]) -> None:
        super().set_state(number, {kind: one for kind, one in state.items() if kind != _OWN})
        if number in self.owned:
            self._weights[number].data = self._parameters[number].detach()
            self._versions.pop(number, None)
            if (values := state.get(_OWN)) is not None:
                self._weights[number].data = values.clone().view(self._parameters[number].shape)
                self._versions[number] = self._parameters[number]._version

    def _own(self, number: int) -> Tensor:
        """An owner's weights: those of all workers where other code has written these, or no step has been taken."""
        own, all_have = self._weights[number], self._parameters[number].detach()
        if self._versions.get(number) != all_have._version:
            own.data = all_have.clone(memory_format=torch.contiguous_format)
            self._versions[number] = all_have._version
        return own

    def _step(self, averages: Mapping[int, Tensor]) -> None:
        for inner, group in zip(self.optimizer.param_groups, self._groups, strict=True):
            inner.update(group_settings(group))
        for number, average in averages.items():
            own = self._weights[number]
            own.grad = (average if self.clip == 1.0 else average * self.clip).view(own.shape)
        self.optimizer.step()
        for number in averages:
            self._weights[number].grad = None


def _those(members: Members, wanted: Callable[[int], bool]) -> Members:
    """Some of them, by their numbers."""
    places = [place for place, number in enumerate(members.parameters) if wanted(number)]
    return replace(
        members,
        parameters=[members.parameters[place] for place in places],
        weights=[members.weights[place] for place in places],
        averages=[members.averages[place] for place in places],
    )


@dataclass(frozen=True)
class EverySetting(AdamSettings):
    """A parameter group's rate, and all else that steps depend on, as text."""

    others: str = ""

    @classmethod
    @override
    def of_group(cls, group: Mapping[str, Any]) -> AdamSettings:
        others = repr(sorted((name, one) for name, one in group_settings(group).items() if not isinstance(one, Tensor)))
        return cls(float(group["lr"]), 0.0, 0.0, 0.0, 0.0, bias_correction=False, eps_inside_sqrt=False, others=others)


class OwnersSynchronizer(ElasticSynchronizer):
    """One in which owners step between the legs, once all know what they have to: the norm, and what is absent."""

    def __init__(self, *of_home: Any) -> None:
        self._between_all_legs = self._vote
        super().__init__(*of_home)

    @override
    def find_clip(self, absent: frozenset[int]) -> None:
        """Nothing: owners have clipped."""

    def _vote(self) -> None:
        """Have gradients with their owners, and be ready to step; nothing where that was done. Collective."""
        steps, table, step = self._steps, self._table, self._step
        sent = [(one, one.sent) for one in self._layout.buckets if one.sent is not None]
        if any(one.brought for _, one in sent):
            return
        steps.begin_step()
        for _, exchange in sent:
            if isinstance(exchange, ExchangeWithBuddies):
                exchange.receive()
        square = sum(norm_of_own(one) ** 2 for _, one in sent) if step.max_norm else 0.0
        missing = any(table.parameters[number].requires_grad for number in self.watcher.missing)
        votes = torch.tensor([square, missing], dtype=torch.float64)
        self._comm.all_reduce(votes)
        absent = frozenset[int]()
        if votes[1]:
            absent = agree_on_absent(self._comm, len(table), self.watcher.arrived, table.describe)
        steps.clip = 1.0
        if step.max_norm:
            step.norm = math.sqrt(votes[0]) if votes[0] >= 0 else math.nan
            steps.clip = clip_coefficient(step.max_norm, step.norm) if math.isfinite(step.norm) else 1.0
        for group in range(len(table.groups)):
            step.settings_sent[group] = table.settings(group)
        for bucket, exchange in sent:
            if isinstance(exchange, ExchangeWithBuddies):
                exchange.step = partial(self._step_owned, bucket, exchange, absent)

    @property
    def _steps(self) -> OwnedSteps:
        steps = self._layout.groups[0].algorithm
        assert isinstance(steps, OwnedSteps)
        return steps

    def _step_owned(self, bucket: Bucket, exchange: ExchangeWithBuddies, absent: frozenset[int]) -> Tensor:
        """What this worker's own weights will be ahead by, fp32 [shard]."""
        shard, rank, size = exchange.shard, self._comm.rank, self._comm.size
        own, others = dict[int, Tensor](), dict[int, Tensor]()
        ahead = torch.zeros_like(exchange.average_of_own)
        places: dict[int, slice] = {}
        for slot in bucket.layout.slots:
            owner, first = divmod(slot.offset, shard)
            place = places[slot.parameter] = slice(first, first + slot.numel)
            if slot.parameter in absent or not slot.numel:
                continue
            if owner == rank:
                own[slot.parameter] = exchange.average_of_own[place]
            elif owner == (rank - 1) % size:
                others[slot.parameter] = exchange.average_of_other[place]
        for number, values in self._steps.try_step(own).items():
            ahead[places[number]] = values
        self._steps.of_other |= others
        return ahead


class OwnersWorkers(ShardedWorkers):
    """ShardedWorkers among whom each parameter of OwnedSteps has an owner and a buddy, by how the buckets are cut; what
    has no owner lies on all."""

    @override
    def _take(self, arrival: Arrival) -> None:
        super()._take(arrival)
        self._published = self._brought

    @override
    def _publish(self, moved: Sequence[int]) -> None:
        """Nothing: all have had the new weights."""

    @override
    def _share_step(self, generation: Generation) -> None:
        ElasticWorkers._share_step(self, generation)

    @override
    def _go_on(self) -> None:
        try:
            ElasticWorkers._go_on(self)
        except CommunicationError as error:
            if error.final:
                raise
            self._synchronizer.watcher.lost = str(error)  # so that the next step begins with a meeting

    @override
    def _move(self) -> None:
        if self._moved:
            owners = self._layout.owners(len(self._names_now))
            every, owned = set(range(len(self._sizes))), set().union(*owners)
            wanted = [every - owned | mine | owners[number - 1] for number, mine in enumerate(owners)]
            if wanted != self._holds:
                self._move_state(wanted)
        super()._move()


def elastic_kinds(options: HomeOptions) -> tuple[type[Synchronizer], type[ElasticWorkers]]:
    """The synchronizer of a home, and what its worker of an elastic job is."""
    if options.owned is not None:
        return OwnersSynchronizer, OwnersWorkers
    made = ShardedWorkers if options.stage else ElasticWorkers
    return Synchronizer if options.elastic is None else ElasticSynchronizer, made
