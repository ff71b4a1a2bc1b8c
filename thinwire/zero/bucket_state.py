"""What a sharded optimizer holds by parameter, where its parameters lie in flat buckets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from thinwire.zero.backward import BackwardWatcher
from thinwire.zero.flat_bucket import FlatBucket
from thinwire.zero.master_weights import MasterWeights
from thinwire.zero.parameter_state import Fragment, Held, ParameterState
from thinwire.zero.sharded_parameters import ShardedParameters

__all__ = ["BucketParameterState", "StateOfBuckets", "of_whole_bucket", "own_fragments"]


class StateOfBuckets(ABC):
    """What a home keeps beside master weights, by the bucket's number."""

    @abstractmethod
    def average(self, bucket: int) -> Tensor | None:
        """The averaged gradient that has arrived, of the whole bucket or of this rank's shard; None in no step."""

    @abstractmethod
    def state(self, bucket: int, parameter: int, kind: str) -> Held:
        """A parameter's optimizer state, by its number; see ParameterState."""

    @abstractmethod
    def kinds(self) -> list[str]:
        """See ParameterState."""

    def check_weights(self) -> None:
        """Raise RuntimeError where ranks hold different weights."""

    def check_gradients(self) -> None:
        """Raise RuntimeError where no gradients are averaged."""

    def check_may_write(self, kind: str) -> None:
        """See ParameterState."""

    def gradients_rewritten(self, bucket: int) -> None:
        """Note that somebody has written into `average`."""

    def weights_rewritten(self, bucket: int) -> None:
        """Note that somebody has written parameters, and that their master weights have followed."""


class BucketParameterState(ParameterState):
    """Weights and gradients of ShardedParameters, and the state that a home keeps beside them.

    `rewritten`: called where gradients were written, so that what is known of the step is found out again.
    """

    cuts_parameters = False

    def __init__(
        self,
        parameters: ShardedParameters,
        watcher: BackwardWatcher,
        of_home: StateOfBuckets,
        rewritten: Callable[[], None],
    ) -> None:
        self.comm = parameters.comm
        self._parameters = parameters
        self._watcher = watcher
        self._of_home = of_home
        self._rewritten = rewritten

    def parameter(self, number: int) -> Tensor:
        """See ParameterState."""
        return self._parameters.order.parameters[number]

    def weights(self, number: int) -> Held:
        """See ParameterState."""
        self._of_home.check_weights()
        self._parameters.wait_for_weights()
        index = self._bucket_of(number)
        masters = self._parameters.masters[index]
        if written := masters.bucket.take_written():
            masters.take_over({slot.parameter for slot in written})
            self._of_home.weights_rewritten(index)
        return Held(own_fragments(masters, number, masters.views), masters.whole)

    def after_writing_weights(self, number: int, value: Tensor | None) -> None:
        """See ParameterState."""
        assert value is not None, "a bucket's weights are written whole, on every rank"
        index = self._bucket_of(number)
        self.parameter(number).copy_(value)
        self._parameters.masters[index].bucket.take_written()  # the master weight has more than the parameter shows
        self._of_home.weights_rewritten(index)

    def state(self, number: int, kind: str) -> Held:
        """See ParameterState."""
        return self._of_home.state(self._bucket_of(number), number, kind)

    def check_may_write_state(self, kind: str) -> None:
        """See ParameterState."""
        self._of_home.check_may_write(kind)

    def gradient(self, number: int) -> Held | None:
        """See ParameterState."""
        self._of_home.check_gradients()
        self._watcher.bring_home()
        index = self._bucket_of(number)
        bucket = self._parameters.buckets[index]
        average = self._of_home.average(index)
        if average is None:
            return None
        if average.numel() == bucket.layout.padded_numel:  # of one rank too, whose shard is the bucket
            return of_whole_bucket(bucket, number, average)
        runs = [run for run in bucket.own_runs if run.parameter == number]
        return Held([Fragment(run.start, average[run.place]) for run in runs], everywhere=False)

    def after_writing_gradient(self, number: int) -> None:
        """See ParameterState."""
        self._watcher.seal_again(number)
        self._of_home.gradients_rewritten(self._bucket_of(number))
        self._rewritten()

    def kinds(self) -> list[str]:
        """See ParameterState."""
        return self._of_home.kinds()

    def _bucket_of(self, number: int) -> int:
        return next(
            index
            for index, bucket in enumerate(self._parameters.buckets)
            if any(slot.parameter == number for slot in bucket.layout.slots)
        )


def own_fragments(masters: MasterWeights, number: int, values: Sequence[Tensor | None]) -> list[Fragment]:
    """What a rank keeps of a parameter; `values`: of each of the masters' runs, None where there are none."""
    return [
        Fragment(run.start, one)
        for run, one in zip(masters.runs, values, strict=True)
        if run.parameter == number and one is not None
    ]


def of_whole_bucket(bucket: FlatBucket, number: int, values: Tensor, known: bool = True) -> Held:
    """A parameter's part of [padded_numel] that every rank has alike."""
    runs = [run for run in bucket.runs(0, bucket.layout.numel) if run.parameter == number]
    return Held([Fragment(run.start, values[run.place]) for run in runs], everywhere=True, known=known)
