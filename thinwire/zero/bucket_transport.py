"""The transport of one bucket, and the order in which the legs of many are issued: fixed by the buckets' numbers alone,
so that ranks cannot disagree about it, and never idle while a bucket waits for its gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from torch import Tensor

from thinwire.zero.bucket_layout import BucketLayout, Slot
from thinwire.zero.gradient_seal import Samples, Taken, is_untouched, taken

__all__ = ["AveragedInPlace", "BucketTransport", "Legs", "Pipeline"]


class Legs(Protocol):
    """A bucket's transfer whose first leg is under way."""

    def advance(self) -> None:
        """Wait for leg 1, combine what it brought, and start leg 2."""

    def wait(self) -> None:
        """Wait for leg 2."""


class Pipeline:
    """Moves buckets on as later ones start: start(0), start(1), advance(0), start(2), advance(1), wait(0), ...

    `hold` keeps every bucket in leg 1 until `drain`, for what must be known of all of them before leg 2. `started`: how
    many buckets have left since `reset`.
    """

    def __init__(self, hold: bool = False) -> None:
        self.hold = hold
        self.reset()

    def follow(self, legs: Legs) -> None:
        """Take charge of a bucket that has just started leg 1, and move the earlier ones on."""
        self._legs.append(legs)
        self.started += 1
        if not self.hold:
            self._move_on(lag=1)

    def drain(self) -> None:
        """Bring every bucket to the end of leg 2."""
        self._move_on(lag=0)

    def reset(self) -> None:
        """Forget them; the next bucket to start is the first one again."""
        self._legs: list[Legs] = []
        self.started = self._advanced = self._waited = 0

    def _move_on(self, lag: int) -> None:
        while self._advanced < self.started - lag:
            self._legs[self._advanced].advance()
            self._advanced += 1
        while self._waited < self.started - 2 * lag:
            self._legs[self._waited].wait()
            self._waited += 1


class BucketTransport(Legs, Protocol):
    """What sends one bucket's gradients."""

    @property
    def layout(self) -> BucketLayout:
        """The bucket's parameters."""

    def keep(self, slot: Slot, parameter: Tensor) -> None:
        """Note a gradient that a later backward will add to, before it is taken."""

    def take(self, slot: Slot, parameter: Tensor) -> None:
        """Take a parameter's gradient, to be sent."""

    def leave_out(self, slot: Slot, expected: bool) -> None:
        """Note that a parameter has no gradient on this rank; `expected`: nor on any other."""

    @property
    def averaged_by_advance(self) -> Collection[int]:
        """Parameters into whose `.grad` `advance` writes averages, by number."""

    @property
    def averaged_by_wait(self) -> Collection[int]:
        """Parameters into whose `.grad` averages are written between `advance` and the end of `wait`."""

    @property
    def may_stay(self) -> bool:
        """Whether `stay` can take the place of a transfer of zeros; the same on every rank."""

    def stay(self) -> None:
        """Note that no rank has a gradient for any of the parameters: nothing will be sent."""

    def start(self) -> None:
        """Start leg 1."""

    def end_step(self) -> None:
        """Forget what this step brought."""


class AveragedInPlace:
    """The legs of a bucket whose averages take the place of gradients in `.grad`: those count as what was taken then.

    `arrived`, `samples`: of all `parameters`, as gradients were taken.
    """

    def __init__(
        self, transport: BucketTransport, arrived: dict[int, Taken], samples: Samples, parameters: Sequence[Tensor]
    ) -> None:
        self._transport = transport
        self._arrived = arrived
        self._samples = samples
        self._parameters = parameters

    def advance(self) -> None:
        """Average, and start leg 2, which writes into `.grad` whenever it arrives."""
        unedited = self._unedited(self._transport.averaged_by_advance)
        self._samples.expect(self._transport.averaged_by_wait)
        self._transport.advance()
        self._take(unedited)

    def wait(self) -> None:
        """Wait for leg 2."""
        unedited = self._unedited(self._transport.averaged_by_wait)
        self._transport.wait()
        self._take(unedited)

    def _unedited(self, numbers: Collection[int]) -> list[int]:
        known = [one for one in numbers if one in self._arrived]
        return [one for one in known if is_untouched(self._parameters[one].grad, self._arrived[one])]

    def _take(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._arrived[number] = taken(self._parameters[number].grad)
        self._samples.take(numbers, self._parameters, averages=True)
