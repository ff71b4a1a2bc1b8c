"""What the two legs of an exchange bring, part by part, and what their headers say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from thinwire.comm import Work
from thinwire.compress.packet import Flags, Header, check_headers

__all__ = ["Arrived", "Headers", "Leg", "Outcome", "of_part"]


@dataclass(frozen=True)
class Outcome:
    """What the headers of one exchange said, the same on every rank.

    `finite`: every owner's average was finite. `incomplete`: some rank had no gradient for some parameter. `unplaced`:
    some rank has a trainable parameter that lies in no bucket yet. `meet`: some rank knows of a worker that waits.
    """

    finite: bool
    incomplete: bool
    unplaced: bool
    meet: bool = False


@dataclass(frozen=True)
class Headers:
    """What came before the packets of one part's leg, uint8 [packets, 16], and their senders, if not ranks 0, 1, ..."""

    raw: Tensor
    part: int
    senders: Sequence[int] | None = None

    def check(self, expected: Header) -> Flags:
        """All flags together; raises PacketError, naming the sender, for a header that is another, flags aside."""
        return check_headers(self.raw, of_part(expected, self.part), self.senders)


@dataclass(frozen=True)
class Leg:
    """One part's packets under way, uint8 [packets, packet_bytes]; both tensors are in use until `work` is over."""

    sent: Tensor
    received: Tensor
    work: Work


@dataclass(frozen=True)
class Arrived:
    """Where an exchange that was captured in a graph has its results, whenever that is replayed."""

    headers: Sequence[Headers]
    legs: Sequence[Leg]
    average: Tensor


def of_part(header: Header, part: int, flags: Flags = Flags.NONE) -> Header:
    """A header without part and flags, with these."""
    return replace(header, part=part, flags=flags) if part or flags else header
