"""Buckets whose ranks change: a step that is lost on its way without an error in a user's backward, to be sent again,
and buckets cut anew for other ranks, with what they held."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor
from typing_extensions import override

from thinwire.comm import CommunicationError, Communicator
from thinwire.compress.exchange import Exchange
from thinwire.compress.packet import PacketError
from thinwire.optim.freeze_group import FreezeGroup
from thinwire.optim.replicated.synchronizer import Synchronizer
from thinwire.zero.backward import BackwardWatcher


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
    def drop(self) -> None:
        self.watcher.try_to(super().drop)

    @override
    def _on_whole(self) -> None:
        if not self.watcher.lost:
            self.watcher.try_to(super()._on_whole)


def hand_on(before: FreezeGroup, after: FreezeGroup) -> None:
    """Have the same buckets, cut for other ranks, go on with what they held: all of the state, a worker's own residual,
    and of an owner's what this rank owns again."""
    after.peak, after.left_out_steps = before.peak, before.left_out_steps
    if after.clock.frozen_at is not None and after.algorithm.frozen_state:
        after.storage.begin_frozen_state()
    for old, new in zip(before.buckets, after.buckets, strict=True):
        for name, values in old.state.items():
            new.state[name][: new.layout.numel].copy_(values[: new.layout.numel])
        old.state.clear()
        if old._compressed is not None:
            _hand_on_residuals(old._compressed, new.compressed)
        if old.rounds_averages:
            assert old.averaging is not None
            assert new.averaging is not None
            new.residual_scale = old.residual_scale
            _hand_on_residuals(old.averaging, new.averaging)
    after.restore()


def _hand_on_residuals(before: Exchange, after: Exchange) -> None:
    if before.worker_residual is not None and after.worker_residual is not None:
        after.worker_residual[: after.numel].copy_(before.worker_residual[: after.numel])
    old, new = before.owner_residual, after.owner_residual
    if old is None or new is None:
        return
    first = max(before.owner_place.start, after.owner_place.start)
    last = min(before.owner_place.stop, after.owner_place.stop)
    if first < last:
        kept = old[first - before.owner_place.start : last - before.owner_place.start]
        new[first - after.owner_place.start : last - after.owner_place.start].copy_(kept)
