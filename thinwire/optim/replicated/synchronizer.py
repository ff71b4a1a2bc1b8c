"""The synchronised backward of parameters whose state every rank holds: what becomes of it, the same on every rank, and
how it is clipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.exchange import Outcome
from thinwire.optim.algorithm import Send
from thinwire.optim.bucket import AlgorithmBucket
from thinwire.optim.freeze_group import FreezeGroup
from thinwire.optim.options import naming_differences
from thinwire.optim.replicated.layout import FreezeGroups
from thinwire.optim.replicated.parameters import ParameterTable
from thinwire.optim.step import clip_by_sketch, hear, may_clip
from thinwire.zero.backward import BackwardWatcher
from thinwire.zero.norm_sketch import NormSketch
from thinwire.zero.rank_checks import agree_on_absent, agree_on_order, find_overflowing
from thinwire.zero.sharded_home import clip_coefficient, clip_of_norm

__all__ = ["SynchronizedBackward", "Synchronizer"]


@dataclass(frozen=True)
class SynchronizedBackward:
    """One synchronised backward, the same on every rank.

    `absent`: the parameters that had no gradient on any rank. `overflowing`: where the averages are not finite, the
    ranks whose own gradients were not.
    """

    finite: bool
    absent: frozenset[int]
    overflowing: tuple[int, ...] = ()


class Synchronizer:
    """Brings backwards to their end, in the buckets of `layout`.

    Buckets hold parameters in the order in which rank 0 saw their gradients arrive: early buckets are then whole early,
    whatever order the parameter groups list them in. The first backward is therefore exchanged as a whole, at its end.

    `norm`: of the averaged gradient, loss scale divided out, NaN where nobody
    found it out. `loss_scale`: what gradients are times.

    Args:
        max_norm: what the averaged gradient's norm is clipped to; 0 does not clip.
    """

    def __init__(
        self,
        comm: Communicator,
        table: ParameterTable,
        layout: FreezeGroups,
        max_norm: float,
    ) -> None:
        self.norm = math.nan
        self.outcome: SynchronizedBackward | None = None  # of the step under way, once it is known
        self.scaled: bool | None = None  # see Home
        self.capturing = False  # into a graph: nothing can be heard at the end of a backward
        self.watcher = BackwardWatcher(table.describe, self._on_whole)
        self.watcher.follow(lambda: not self.scales_apart)
        self._comm = comm
        self._table = table
        self._layout = layout
        self._under_way = layout.under_way
        self._max_norm = max_norm
        self._loss_scale = 1.0
        self._heard = 0
        self._sketch: NormSketch | None = None
        self._watched: tuple[list[AlgorithmBucket], Callable[[], None] | None] = ([], None)

    @property
    def loss_scale(self) -> float:
        """See the class; between backward() and step() a new one is noted, and what left as if it were another is sent
        again."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._loss_scale = scale
        if not self.watcher.in_step or self.scales_apart:
            self._under_way.loss_scale = scale

    @property
    def scales_apart(self) -> bool:
        """Whether GradScalers' scales may differ: local steps leave each alone with its overflows."""
        return bool(self.scaled) and any(group.shows_own_weights for group in self._layout.groups)

    def finish(self) -> SynchronizedBackward:
        """Send what has not left yet, wait for everything and say what became of it. Collective.

        Raises PacketError where the ranks have lost step, and ValueError, on every rank, where some rank has no
        gradient for a parameter that has one on others.
        """
        if self.outcome is not None:
            return self.outcome
        try:
            self.watcher.finish()
            outcomes = self._hear()
            if not self._layout.buckets or any(outcome.unplaced for outcome in outcomes):
                self._place_in_order_of_arrival()
                self.watcher.finish()
                outcomes += self._hear()
            found = self._judge(outcomes, set(self.watcher.arrived))
        except BaseException:
            self.end_step()
            raise
        self.outcome = replace(found, absent=found.absent | self.watcher.left_out)
        self.watcher.usually_absent = found.absent - self.watcher.left_out
        return self.outcome

    def finish_replay(self) -> None:
        """Say what became of a backward, and of legs, that a graph's replay has brought; `finish` then knows.
        Collective, and raises, as `finish`."""
        try:
            brought = {index for index, one in enumerate(self._table.parameters) if one.grad is not None}
            self.outcome = self._judge(self._hear(), brought)
        except BaseException:
            self.end_step()
            raise

    def check_scalers(self) -> None:
        """Raise RuntimeError, on every rank, where an overflow of this step has been kept from some GradScalers.
        Collective."""
        scaler_has_seen = self.outcome is not None or not self.scaled or self.scales_apart
        overflowing = self.finish().overflowing
        if not scaler_has_seen and 0 < len(overflowing) < self._comm.size:
            self.end_step()
            raise RuntimeError(
                f"a gradient overflowed on ranks {list(overflowing)} in a step that some parameters took no part in, "
                "so that the GradScalers of other ranks could not see it and would keep their scale. Give every "
                "parameter a gradient in each backward, or train in bf16 without a GradScaler"
            )

    def finish_as_it_is(self) -> SynchronizedBackward:
        """The same, sent again where payloads left as if this step's scale, or settings, were other ones. Collective.

        They change rarely, and alike on every rank; nothing is committed yet.
        """
        outcome = self.finish()
        if outcome.finite and self._is_outdated():
            self._under_way.loss_scale = self._loss_scale
            self._under_way.begin_sending()
            self.outcome = None
            self._heard = 0
            self.watcher.send_again()
            outcome = self.finish()
        self._under_way.loss_scale = self._loss_scale
        return outcome

    def hear_again(self) -> None:
        """Find out once more what became of this backward, whose averages somebody has written to."""
        self.outcome = None
        self._heard = 0

    def end_step(self) -> None:
        """Forget the step; the next backward begins another."""
        self.watcher.end_step()
        self.outcome = None
        self._heard = 0
        self._under_way.loss_scale = self._loss_scale
        self.prepare()

    def prepare(self) -> None:
        """Be ready for the next step: where its averaged gradient's norm has to be known before leg 2, hold that."""
        self._under_way.begin()
        self.norm = math.nan
        sends = {group.send for group in self._layout.groups} | self._layout.sends_of_unplaced()
        sketched = bool(self._max_norm) and bool(sends - {Send.EXACT})
        if sketched and self._sketch is None:
            self._sketch = NormSketch(self._layout.comm, self._table.parameters[0].device)
        if self._sketch is not None:
            self._sketch.begin(self._under_way.number)
        self._under_way.sketch = self._sketch if sketched else None
        between_legs = self._sketch_clip if sketched and Send.LOCAL not in sends else None
        if (buckets := self._layout.buckets, between_legs) != self._watched:
            self._watched = (buckets, between_legs)
            self.watcher.use(buckets, keeps_gradients=True, between_legs=between_legs)

    def find_clip(self, absent: frozenset[int]) -> None:
        """The clip of steps in which averaged gradients are there, or only this rank's own. Collective."""
        if not self._max_norm:
            return
        exact = [group for group in self._layout.groups if group.send is Send.EXACT]
        local = [group for group in self._layout.groups if group.send is Send.LOCAL]
        if exact and len(exact) + len(local) == len(self._layout.groups):
            square = _square_of_averages(exact, absent).to(self._table.parameters[0].device)
            self._layout.comm.broadcast(square)
            self.norm = math.sqrt(float(square)) / self._loss_scale
            self._under_way.clip = clip_coefficient(self._max_norm, self.norm) if math.isfinite(self.norm) else 1.0
        if local:
            assert self._sketch is not None
            clip = clip_of_norm(self._max_norm, self._sketch.own_norm() / self._loss_scale)
            for bucket in (one for group in local for one in group.buckets if may_clip(clip)):
                bucket.clip_own(clip)

    # Parts

    def _on_whole(self) -> None:
        if not self.capturing and not self.finish().finite:
            # Where another rank's gradients are not finite: a GradScaler must see it on every rank.
            for index in self.watcher.arrived:
                gradient = self._table.parameters[index].grad
                if gradient is not None and gradient.numel():
                    gradient[(0,) * gradient.dim()] = math.inf
                    return

    def _hear(self) -> list[Outcome]:
        """The outcomes of the buckets not heard of yet."""
        with naming_differences(self._comm, self._under_way.groups):
            buckets = self._layout.buckets[self._heard :]
            norm = hear(self._under_way, (one.sent for one in buckets if one.sent is not None))
            heard = [bucket.outcome() for bucket in buckets]
        if norm is not None:
            self.norm = norm / self._loss_scale
        self._heard = len(self._layout.buckets)
        return [outcome for outcome in heard if outcome is not None]

    def _judge(self, outcomes: Sequence[Outcome], arrived: set[int]) -> SynchronizedBackward:
        absent: frozenset[int] = frozenset()
        if any(outcome.incomplete for outcome in outcomes):
            absent = agree_on_absent(self._comm, len(self._table), arrived, self._table.describe)
        finite = all(outcome.finite for outcome in outcomes)
        overflowing = () if finite else find_overflowing(self._comm, self._table.parameters)
        return SynchronizedBackward(finite, absent, overflowing)

    def _is_outdated(self) -> bool:
        """Whether what left is not what would be sent now, on every rank alike."""
        changed = self._under_way.loss_scale != self._loss_scale
        sent = self._under_way.settings_sent.items()
        return (changed and any(group.send is not Send.EXACT for group in self._layout.groups)) or any(
            settings != self._table.settings(group) for group, settings in sent
        )

    def _place_in_order_of_arrival(self) -> None:
        trainable = self._layout.trainable_unplaced
        order = agree_on_order(self._comm, trainable, self.watcher.arrived, self._table.describe)
        if order:
            self.watcher.add(self._layout.place(order).buckets)

    def _sketch_clip(self) -> None:
        clip_by_sketch(self._under_way, self._max_norm, self._loss_scale)


def _square_of_averages(groups: Sequence[FreezeGroup], absent: frozenset[int]) -> Tensor:
    """The square of the averaged gradients' 2-norm, times that of the loss scale, in an EXACT step: fp64 []."""
    members = [one for group in groups for one in group.weights.members(absent)]
    norms = [norm for one in members for norm in torch._foreach_norm(one.averages)]
    return torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
