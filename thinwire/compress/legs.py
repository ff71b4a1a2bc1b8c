"""Packets in flight in one leg of an exchange, and packets that leave without the padding of unlike shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import Work
from thinwire.compress.codecs import Codec
from thinwire.compress.packet_layout import filled_bytes


@dataclass(frozen=True)
class Leg:
    """One part's packets in flight, uint8 [packets, packet_bytes]; both tensors are in use until `work` is over."""

    sent: Tensor
    received: Tensor
    work: Work


class Trim:
    """Has packets travel without their shards' padding: each as one of its first elements alone, end to end, and spread
    again where they come, with zeros for the rest. What encodes and decodes them sees the packets that it always saw.
    """

    def __init__(self, codec: Codec, parts: Sequence[slice], filled: Sequence[int], own: int) -> None:
        """`filled`: elements that travel of each of the ranks' shards, from its start, whole blocks; `own`: whose this
        rank's is."""
        self._own = own
        self._cuts: list[list[list[slice]]] = []  # of each part, and each shard: what travels of its packet
        for place in parts:
            numel = place.stop - place.start
            of_part = (min(max(one - place.start, 0), numel) for one in filled)
            self._cuts.append([filled_bytes(codec.name, numel, one, codec.block_size) for one in of_part])

    def start(self, collective: Callable[..., Work], number: int, packets: Tensor, received: Tensor) -> Work:
        """Start an all-to-all of all shards' `packets`, or an all-gather of the own one, of the part with this number,
        into `received`, uint8 [ranks, packet_bytes]."""
        cuts = self._cuts[number]
        own, gathers = [cuts[self._own]], len(packets) < len(cuts)
        sent = torch.cat(_views(packets, own if gathers else cuts))
        views = _views(received, cuts if gathers else own * len(cuts))
        sizes = [sum(cut.stop - cut.start for cut in one) for one in cuts]
        arriving = sent.new_empty(sum(map(len, views)))
        work = collective(arriving, sent, sizes=sizes, async_op=True)

        def spread() -> None:
            received.zero_()
            torch._foreach_copy_(views, list(torch.split(arriving, [len(one) for one in views])))

        return _Followed(work, spread)


class _Followed(Work):
    """A collective, and what is done here with what it has brought."""

    def __init__(self, work: Work, action: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._action = work, action
        self._over = False

    @override
    def is_completed(self) -> bool:
        return self._work.is_completed()

    @override
    def wait(self, timeout: float | None = None) -> None:
        self._work.wait(timeout)
        if not self._over:
            self._over = True
            self._action()


def _views(packets: Tensor, cuts: Sequence[Sequence[slice]]) -> list[Tensor]:
    return [row[cut] for row, of_row in zip(packets, cuts, strict=True) for cut in of_row if cut.stop > cut.start]
