"""The weights of a freeze group: how they lie before an algorithm's step, and how they move. Each home has its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from thinwire.optim.algorithm import Clock, LocalSteps, Members, MembersByGroup
from thinwire.optim.bucket import AlgorithmBucket
from thinwire.optim.step import Parameters
from thinwire.zero import Slot
from thinwire.zero.master_weights import Run

__all__ = ["GroupWeights", "slots_with_elements"]

Change = Callable[[Sequence[Members]], None]
"""Changes the weights of members in place."""


class GroupWeights(ABC):
    """The weights behind some buckets, those that all ranks have in common."""

    def __init__(self, parameters: Parameters, buckets: Sequence[AlgorithmBucket]) -> None:
        self._parameters = parameters
        self._buckets = buckets

    @abstractmethod
    def weight(self, bucket: AlgorithmBucket, slot: Slot) -> Tensor:
        """What `members` have for a parameter's weight."""

    def view(self, bucket: AlgorithmBucket, values: Tensor, slot: Slot) -> Tensor:
        """A parameter's part of [padded_numel]."""
        return bucket.view(values, slot)

    def members(self, absent: Collection[int] = (), *, trained: bool = False) -> list[Members]:
        """The parameters with elements, but `absent` ones, and with `trained` only those that require gradients."""
        members = MembersByGroup(self._parameters.settings, self._parameters.mask)
        for bucket in self._buckets:
            payload, state = bucket.exchange.payload, bucket.whole_state
            for slot in slots_with_elements(bucket, absent):
                if trained and not self._parameters.parameters[slot.parameter].requires_grad:
                    continue
                members.add(
                    self._parameters.group_number(slot.parameter),
                    slot.parameter,
                    self.weight(bucket, slot),
                    self.view(bucket, payload, slot),
                    {name: self.view(bucket, values, slot) for name, values in state.items()},
                )
        return members.in_order()

    def absorb_owned(
        self, algorithm: LocalSteps, clock: Clock, groups: Sequence[Members], absent: Collection[int]
    ) -> None:
        """Have the algorithm take averages into the state of owners, and give what they publish to every rank."""
        algorithm.absorb_owned(groups, clock)

    def settle(self, algorithm: LocalSteps, clock: Clock, groups: Sequence[Members], absent: Collection[int]) -> None:
        """Have the algorithm do what takes whole parameters."""
        algorithm.settle(groups, clock)

    @abstractmethod
    def change(self, change: Change, groups: Sequence[Members], steps: int) -> None:
        """Have the common weights of `groups` changed, the same bits on every rank, after so many steps."""

    @abstractmethod
    def to_move(self, bucket: AlgorithmBucket) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The weights of each slot that trains, fp32 and contiguous, and the 16-bit replicas that show them, for the
        form to move; copies of those that lie otherwise, which `moved` takes back. After `take_over_written`."""

    @abstractmethod
    def moved(self, bucket: AlgorithmBucket) -> None:
        """Take over what was done to the last `to_move`'s weights and replicas."""

    @abstractmethod
    def moves_in_place(self, bucket: AlgorithmBucket) -> bool:
        """Whether `to_move` copies nothing."""

    @abstractmethod
    def show_common(self) -> None:
        """Write the common weights into the parameters."""

    @abstractmethod
    def common(self, bucket: AlgorithmBucket, slot: Slot) -> Tensor:
        """A parameter's common weights, flat."""

    @abstractmethod
    def show(self, bucket: AlgorithmBucket, slot: Slot, weight: Tensor) -> None:
        """Write a parameter's own weights, flat fp32, into it."""

    @abstractmethod
    def stand_apart(self) -> None:
        """Keep the common weights where they are whatever parameters show."""

    @abstractmethod
    def take_over_written(self, in_sync: bool) -> list[tuple[AlgorithmBucket, Slot]]:
        """Take over what other code has written into parameters; without `in_sync` say where instead."""

    @abstractmethod
    def holds(self, bucket: AlgorithmBucket, slot: Slot, weight: Tensor) -> bool:
        """Whether a parameter shows these weights, flat fp32; then that is what was shown."""

    @abstractmethod
    def saved(self, bucket: AlgorithmBucket, run: Run, own: bool) -> dict[str, Tensor]:
        """The common `weight`, and the `master` where there is one, of a run of a parameter in this rank's shard.

        `own`: whether parameters show the ranks' own weights.
        """

    @abstractmethod
    def end_step(self, sent: bool, exact: bool, steps: int) -> None:
        """Note that a step is over, and whether it sent something, exact averages at that."""


def slots_with_elements(bucket: AlgorithmBucket, absent: Collection[int] = ()) -> list[Slot]:
    """A bucket's parameters with elements, but `absent` ones."""
    return [slot for slot in bucket.layout.slots if slot.numel and slot.parameter not in absent]
