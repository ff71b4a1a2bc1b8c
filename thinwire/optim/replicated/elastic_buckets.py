"""Buckets whose ranks change: a step that is lost on its way without an error in a user's backward, to be sent again,
and buckets cut anew for other ranks, with what they held."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from thinwire.comm import CommunicationError, Communicator
from thinwire.compress.codecs import resized
from thinwire.compress.exchange import Exchange, look_on
from thinwire.compress.packet import Flags, PacketError
from thinwire.optim.bucket import Bucket, place_of
from thinwire.optim.freeze_group import FreezeGroup
from thinwire.optim.replicated.parameters import WholeStorage
from thinwire.optim.replicated.synchronizer import FreezeGroups, SynchronizedBackward, Synchronizer
from thinwire.optim.wire import Wire
from thinwire.zero.backward import BackwardWatcher


@dataclass(frozen=True)
class Arrival:
    """What a step brought, by which it is applied, the same on every worker. `packets`: of leg 2, part by part."""

    backward: SynchronizedBackward
    norm: float
    clip: float
    packets: list[Tensor]

    def but_packets(self) -> bytes:
        """All but those, for `of` on another worker."""
        one = self.backward
        return json.dumps([one.finite, [*one.absent], one.overflowing, one.calls, self.norm, self.clip]).encode()

    @classmethod
    def of(cls, told: bytes, packets: list[Tensor]) -> Arrival:
        """What another worker tells of with `but_packets`, and these."""
        finite, absent, overflowing, calls, norm, clip = json.loads(told)
        backward = SynchronizedBackward(finite, frozenset(absent), tuple(overflowing), Flags(calls))
        return cls(backward, norm, clip, packets)


class PatientWatcher(BackwardWatcher):
    """A BackwardWatcher that sends nothing more of a step of which something is `lost`; gradients stay in `.grad`."""

    lost = ""

    @override
    def _on_gradient(self, number: int) -> None:
        if not self.lost:
            self.try_to(lambda: super(PatientWatcher, self)._on_gradient(number))

    @override
    def leave_out(self, parameters: Iterable[Tensor], comm: Communicator) -> None:
        raise RuntimeError("an elastic job leaves no parameters out of a step, which it might have to send again")

    def try_to(self, send: Callable[[], None]) -> None:
        """Note what is lost, why ever, but for what no repetition mends."""
        try:
            send()
        except PacketError:
            raise
        except CommunicationError as error:
            self.lost = self.lost or str(error)


class ElasticSynchronizer(Synchronizer):
    """A Synchronizer for which a lost transfer is no error of a backward: `step` sends all of it again."""

    watcher: PatientWatcher
    watcher_kind = PatientWatcher

    def move(self, comm: Communicator) -> None:
        """Go on over other ranks, in whatever buckets there are by now."""
        self._comm, self._sketch = comm, None
        self.end_step()

    @override
    def give_up(self) -> None:
        """Keep what there is of the step: a survivor may have the rest."""

    def take_over(self, arrived: Arrival) -> None:
        """Have all of the step in flight, of which this worker has sent everything, as another has it."""
        packets = iter(arrived.packets)
        for one in self._sent():
            look_on(one, [next(packets) for _ in one.parts])
        self.outcome, self._step.norm, self._step.clip = arrived.backward, arrived.norm, arrived.clip
        self._step.sketched, self.watcher.usually_absent = None, arrived.backward.absent

    def arrival(self, backward: SynchronizedBackward) -> Arrival:
        """All that a step has brought: this worker's own, or, before `take_over`, room for another's."""
        clip = float(self._step.clip)
        return Arrival(backward, self._step.norm, clip, [leg.received for one in self._sent() for leg in one.brought])

    def _sent(self) -> list[Exchange]:
        return [one.sent for one in self._layout.buckets if one.sent is not None]

    @override
    def drop(self) -> None:
        self.watcher.try_to(super().drop)

    @override
    def _on_whole(self) -> None:
        if not self.watcher.lost:
            self.watcher.try_to(super()._on_whole)


Owned = dict[tuple[int, str], tuple[slice, Tensor]]
"""Owners' residuals and the elements that they are of, by the bucket's number and which of its exchanges it is."""


def owned_residuals(groups: Iterable[FreezeGroup]) -> Owned:
    """Those of this rank."""
    found: Owned = {}
    for bucket in (bucket for group in groups for bucket in group.buckets):
        for kind, exchange in _with_residuals(bucket):
            if exchange.owner_residual is not None:
                found[bucket.index, kind] = exchange.owner_place, exchange.owner_residual
    return found


def cut_anew(layout: FreezeGroups, wire: Wire, owned: Owned) -> None:
    """Cut all buckets for the ranks of `wire`, with what they held and this rank has `owned`."""
    before = layout.cut_anew(wire)
    for group in layout.groups:
        _hand_on(before.pop(0), group, owned)  # and let go of it, so that only one is there twice


def _hand_on(before: FreezeGroup, after: FreezeGroup, owned: Owned) -> None:
    """Have the same buckets, cut for other ranks, go on with what they held: all of the state, a worker's own residual,
    and what this rank owns again of what it has `owned`."""
    after.peak, after.left_out_steps = before.peak, before.left_out_steps
    assert isinstance(after.storage, WholeStorage)
    after.storage.take_over(before.buckets)
    for old, new in zip(before.buckets, after.buckets, strict=True):
        new.residual_scale = old.residual_scale
        kept = dict(_with_residuals(old))
        for kind, exchange in _with_residuals(new, also_new="compressed" in kept):
            if kind in kept and new.layout.whole:
                _go_on_elsewhere(exchange, new, kept[kind], old)
            elif kind in kept:
                _go_on(exchange, kept[kind])
            if (new.index, kind) in owned:
                _own_again(exchange, *owned[new.index, kind])
        if old.zero_variance is not None:
            new.find_zero_variance()
    if after.shows_own_weights:
        after.storage.keep_common()
        after.show_own_weights(True)
    after.prepare()


def _with_residuals(bucket: Bucket, *, also_new: bool = False) -> list[tuple[str, Exchange]]:
    """Exchanges that keep residuals from step to step; `also_new`: one that compresses is made if there is none."""
    found = [("compressed", bucket.compressed)] if also_new or bucket._compressed is not None else []
    if bucket.rounds_averages:
        assert bucket.averaging is not None
        found.append(("averaging", bucket.averaging))
    return found


def _go_on(exchange: Exchange, before: Exchange) -> None:
    """Have it keep a worker's residual, in its memory, and its payload's memory."""
    numel, residual = exchange.numel, before.worker_residual
    payload = before._free if before._payload is None else before._payload
    if exchange.worker_residual is not None and residual is not None:
        exchange.worker_residual = resized(residual, numel, len(exchange.worker_residual))
    if payload is not None:
        exchange._payload, exchange._free = None, resized(payload, numel, exchange.padded_numel)


def _go_on_elsewhere(exchange: Exchange, bucket: Bucket, before: Exchange, old: Bucket) -> None:
    """Have it keep a worker's residual where parameters lie in other places."""
    new, held = exchange.worker_residual, before.worker_residual
    assert new is not None
    assert held is not None
    for here, there in zip(bucket.layout.slots, old.layout.slots, strict=True):
        new[place_of(here)].copy_(held[place_of(there)])


def _own_again(exchange: Exchange, place: slice, residual: Tensor) -> None:
    mine, own = exchange.owner_place, exchange.owner_residual
    first, last = max(place.start, mine.start), min(place.stop, mine.stop)
    if own is not None and first < last:
        own[first - mine.start : last - mine.start].copy_(residual[first - place.start : last - place.start])
