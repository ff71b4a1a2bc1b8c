"""What the sharded homes of algorithms hold by parameter, while it still is what its name says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from typing_extensions import override

from thinwire.optim.algorithm import Algorithm, Clock, Send
from thinwire.optim.freeze_group import FreezeGroup
from thinwire.optim.home import check_averages, check_in_sync, check_may_write, check_plain
from thinwire.optim.sharded.weights import CommonWeights
from thinwire.zero.gradients import BucketGradients
from thinwire.zero.home import Held
from thinwire.zero.master_weights import FlatBucket, MasterWeights
from thinwire.zero.sharded_home import StateOfBuckets, of_whole_bucket, own_fragments

__all__ = ["GroupState", "WarmupState"]


class WarmupState(StateOfBuckets):
    """Of a packed home: moments of shards until the freeze."""

    def __init__(
        self,
        algorithm: Algorithm,
        clock: Clock,
        masters: Sequence[MasterWeights],
        state: Sequence[Mapping[str, Tensor]],
        gradients: Sequence[BucketGradients],
    ) -> None:
        self._algorithm = algorithm
        self._clock = clock
        self._masters = masters
        self._state = state
        self._gradients = gradients

    @override
    def check_gradients(self) -> None:
        check_averages(not self._clock.frozen)

    @override
    def average(self, bucket: int) -> Tensor | None:
        return self._gradients[bucket].average if self._gradients[bucket].filled else None

    @override
    def check_may_write(self, kind: str) -> None:
        check_may_write(self._algorithm, self._clock, kind)

    @override
    def state(self, bucket: int, parameter: int, kind: str) -> Held:
        check_plain(self._algorithm, self._clock, kind)
        masters, values = self._masters[bucket], self._state[bucket].get(kind)
        views = [None if values is None else values[run.place] for run in masters.runs]
        return Held(own_fragments(masters, parameter, views), everywhere=False, known=values is not None)

    @override
    def kinds(self) -> list[str]:
        return [] if self._clock.frozen else sorted(self._algorithm.state)


class GroupState(StateOfBuckets):
    """Of a full home: state of whole buckets, and what owners keep of theirs."""

    def __init__(
        self, group: FreezeGroup, buckets: Sequence[FlatBucket], common_weights: Sequence[CommonWeights]
    ) -> None:
        self._group = group
        self._buckets = buckets
        self._common_weights = common_weights

    @override
    def check_weights(self) -> None:
        check_in_sync(self._group.in_sync)

    @override
    def weights_rewritten(self, bucket: int) -> None:
        self._common_weights[bucket].adopt()

    @override
    def check_gradients(self) -> None:
        check_averages(self._group.send is Send.EXACT)

    @override
    def average(self, bucket: int) -> Tensor | None:
        return self._group.buckets[bucket].average()

    @override
    def gradients_rewritten(self, bucket: int) -> None:
        self._group.buckets[bucket].average_rewritten()

    @override
    def check_may_write(self, kind: str) -> None:
        check_may_write(self._group.algorithm, self._group.clock, kind)

    @override
    def state(self, bucket: int, parameter: int, kind: str) -> Held:
        check_plain(self._group.algorithm, self._group.clock, kind)
        kept = self._group.buckets[bucket]
        if kind in kept.whole_state:
            return of_whole_bucket(self._buckets[bucket], parameter, kept.whole_state[kind])
        values, masters = kept.state.get(kind), self._common_weights[bucket].masters
        views = [None if values is None else values[run.place] for run in masters.runs]
        return Held(own_fragments(masters, parameter, views), everywhere=False, known=values is not None)

    @override
    def kinds(self) -> list[str]:
        return sorted(self._group.buckets[0].state)
