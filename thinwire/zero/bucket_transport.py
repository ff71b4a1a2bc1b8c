"""The transport of one bucket, and the order in which the legs of many are issued: fixed by the buckets' numbers alone,
so that ranks cannot disagree about it, and never idle while a bucket waits for its gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from thinwire.zero.bucket_layout import BucketLayout, Slot
from thinwire.zero.gradient_seal import GradientSeal, SharedDigest

__all__ = ["BucketTransport", "Legs", "Pipeline", "Resealing", "seal_together"]


class Legs(Protocol):
    """A bucket's transfer whose first leg is under way."""

    def advance(self) -> None:
        """Wait for leg 1, combine what it brought, and start leg 2."""

    def wait(self) -> None:
        """Wait for leg 2."""


class Pipeline:
    """Moves buckets on as later ones start: start(0), start(1), advance(0), start(2), advance(1), wait(0), ...

    `hold` keeps every bucket in leg 1 until `drain`, for what must be known of all of them before leg 2.
    """

    def __init__(self, hold: bool = False) -> None:
        self.hold = hold
        self._legs: list[Legs] = []
        self._advanced = 0
        self._waited = 0

    @property
    def started(self) -> int:
        """How many buckets have left since `reset`."""
        return len(self._legs)

    def follow(self, legs: Legs) -> None:
        """Take charge of a bucket that has just started leg 1, and move the earlier ones on."""
        self._legs.append(legs)
        if not self.hold:
            self._move_on(lag=1)

    def drain(self) -> None:
        """Bring every bucket to the end of leg 2."""
        self._move_on(lag=0)

    def reset(self) -> None:
        """Forget them; the next bucket to start is the first one again."""
        self._legs = []
        self._advanced = self._waited = 0

    def _move_on(self, lag: int) -> None:
        while self._advanced < len(self._legs) - lag:
            self._legs[self._advanced].advance()
            self._advanced += 1
        while self._waited < len(self._legs) - 2 * lag:
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
    def digest(self) -> Callable[[], Tensor] | None:
        """What looks at all of its parameters' gradients together, for a `SharedDigest`; None where they are better
        looked at one by one."""

    @property
    def may_stay(self) -> bool:
        """Whether `stay` can take the place of a transfer of zeros; the same on every rank."""

    def stay(self) -> None:
        """Note that no rank has a gradient for any of the parameters: nothing will be sent."""

    def start(self) -> None:
        """Start leg 1."""

    def end_step(self) -> None:
        """Forget what this step brought."""


def seal_together(transport: BucketTransport, seals: Mapping[int, GradientSeal]) -> None:
    """Look at the values of a bucket's gradients, where that is done together."""
    if transport.digest is None:
        return
    known = [seals[slot.parameter] for slot in transport.layout.slots if slot.parameter in seals]
    here = [seal for seal in known if seal.has_values]
    if here:
        shared = SharedDigest(transport.digest)
        for seal in here:
            seal.shared = shared


class Resealing:
    """A bucket's legs; gradients that averages take the place of are sealed as they are then, if nobody edited them."""

    def __init__(
        self, transport: BucketTransport, seals: dict[int, GradientSeal], parameters: Sequence[Tensor]
    ) -> None:
        self._transport = transport
        self._seals = seals
        self._parameters = parameters
        self._changing: list[int] = []

    def advance(self) -> None:
        """See Legs."""
        by_advance = self._intact(self._transport.averaged_by_advance)
        self._changing = self._intact(self._transport.averaged_by_wait)
        self._transport.advance()
        self._seal(by_advance)
        for number in self._changing:
            self._seals[number].open()

    def wait(self) -> None:
        """See Legs."""
        self._transport.wait()
        self._seal(self._intact(self._changing))

    def _intact(self, numbers: Collection[int]) -> list[int]:
        return [one for one in numbers if one in self._seals and self._seals[one].holds(self._parameters[one])]

    def _seal(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._seals[number] = GradientSeal(self._parameters[number])
