"""Both legs of a bucket whose owners do something to averages between them, and have a buddy that can do the same: the
next rank, which gets what an owner gets, as the same packets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.compress.codecs import Codec, least_part
from thinwire.compress.exchange import Adjust, EncodePart, Exchange
from thinwire.compress.legs import Leg, Trim
from thinwire.compress.light_exchanges import ExchangeFromOwners, ExchangeToOwners, rolled
from thinwire.compress.packet import Flags, Outcome


class ExchangeWithBuddies(ExchangeToOwners):
    """Leg 1 through `codec` to each owner and its buddy, and leg 2 `back`, without error feedback, from owners.

    `receive` brings leg 1 to its end: `average_of_own`, and the same bits as the owner's in `average_of_other`, fp32
    [shard], of the rank before. `advance` sends what `step` makes of the bucket: fp32 [shard], this owner's. A rank
    that sends leg 2 has received leg 1, its buddy's part too; so who has had all of leg 2 knows that all have.
    """

    buddies: ClassVar[bool] = True
    step: Callable[[], Tensor]

    def __init__(
        self, comm: Communicator, numel: int, codec: Codec, back: Codec, *, gaps: Sequence[slice], **options: Any
    ) -> None:
        """`gaps`: elements that belong to nothing, in which no residual adds up."""
        options["part"] = max(least_part(one, comm.backend) for one in (codec, back))
        self.back = ExchangeFromOwners(comm, numel, back, **options)
        super().__init__(comm, numel, codec, **options)
        self.average_of_other = torch.empty_like(self.average_of_own)
        self._gaps, self._has_buddies = gaps, comm.size > 1
        self._leg_of_other: list[Leg] = []
        self._received = False
        self._trim_of_other: Trim | None = None

    def skip_padding(self, filled: Sequence[int]) -> None:
        """Send of each shard only so many elements, from its start."""
        rank, behind = self._comm.rank, rolled(filled, 1)
        self.trim, self.back.trim = (Trim(one.codec, one.parts, filled, rank) for one in (self, self.back))
        self._trim_of_other = Trim(self.codec, self.parts, behind, rank)

    @override
    def start(self, step: int, flags: Flags = Flags.NONE, settings: int = 0, encode: EncodePart | None = None) -> None:
        self._clear_gaps(self.payload)
        self._received, self._leg_of_other = False, []
        super().start(step, flags, settings, encode)
        for number, leg in enumerate(self._leg_1 if self._has_buddies else ()):
            send, receive = leg.sent.roll(1, 0), torch.empty_like(leg.received)
            if self._trim_of_other is None:
                work = self._comm.all_to_all(receive.view(-1), send.view(-1), async_op=True)
            else:
                work = self._trim_of_other.start(self._comm.all_to_all, number, send, receive)
            self._leg_of_other.append(Leg(send, receive, work))

    def receive(self) -> None:
        """Wait for leg 1; nothing the second time."""
        if self._received:
            return
        super().advance()
        for place, leg in zip(self.parts, self._leg_of_other, strict=False):
            leg.work.wait()
            self.codec.decode_mean(leg.received, self.average_of_other[place], place.stop - place.start)
        if self._has_buddies and self._leading is not None:
            self._leading.add_mean(self.average_of_other, 1)
        self._received, self._leg_of_other = True, []

    @override
    def advance(self, adjust: Adjust | None = None) -> None:
        self.receive()
        self.back.start_from_owners(self.step(), self._expected.step)

    @override
    def wait(self) -> None:
        self.back.wait()

    @property
    @override
    def has_arrived(self) -> bool:
        return self.back.has_arrived

    @property
    @override
    def brought(self) -> list[Leg]:
        return self.back.brought

    @brought.setter
    def brought(self, legs: list[Leg]) -> None:
        self.back.brought = legs

    @override
    def outcome(self) -> Outcome:
        there, back = super().outcome(), self.back.outcome()
        return Outcome(there.finite and back.finite, there.incomplete, there.unplaced, there.calls)

    @override
    def read(self, output: Tensor) -> None:
        self.back.read(output)

    @override
    def commit(self) -> None:
        super().commit()
        assert self.worker_residual is not None
        self._clear_gaps(self.worker_residual)

    def _clear_gaps(self, values: Tensor) -> None:
        for gap in self._gaps:
            values[gap].zero_()


def norm_of_own(exchange: Exchange) -> float:
    """The 2-norm of the owner's average, between `start` and `advance`; waits for leg 1."""
    if isinstance(exchange, ExchangeToOwners):
        return float(exchange.average_of_own.norm())
    square = 0.0
    for place, leg, valid in zip(exchange.parts, exchange._leg_1, exchange._part_valid, strict=True):
        leg.work.wait()
        average = torch.empty(place.stop - place.start, device=leg.received.device)
        exchange.codec.decode_mean(leg.received, average, valid)
        square += float(average.norm()) ** 2
    return math.sqrt(square)
