"""The compressed all-reduce over nodes of several ranks: exact inside a node, through the codec between nodes only, so
that a node sends what one rank would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.comm.agreement import NodeLinks
from thinwire.compress.codecs import Codec
from thinwire.compress.exchange import Adjust, Division, EncodePart, Exchange
from thinwire.compress.legs import Leg, Trim
from thinwire.compress.light_exchanges import ExchangeFromOwners, ExchangeToOwners
from thinwire.compress.packet import (
    Flags,
    Headers,
    PacketError,
    SettingsError,
    flags_on_device,
    pass_on_flags,
    write_headers,
)
from thinwire.compress.packet_layout import HEADER_BYTES


class HierarchicalExchange(Exchange):
    """Average a vector over all ranks, with the nodes as 1-bit Adam's workers.

    A node's ranks add up their vectors in fp32, each one a lane of it: 1/lanes. Ranks of one lane then do what Exchange
    does with that part, nodes being the workers, and share what came back inside their node, as packets. Nodes may
    have different numbers of ranks: every rank's vector counts the same. Ranks beyond the smallest node's number only
    add and listen.

    `worker_residual`, [lane], and `owner_residual` are empty on those. Residuals are fp32 and `reversible` always.
    """

    def __init__(self, links: NodeLinks, numel: int, codec: Codec, **options: Any) -> None:
        self._links = links
        nodes, lane = links.num_nodes, links.lane
        division = Division(
            shards=links.lanes * nodes,
            sent=0 if lane is None else nodes,
            own=None if lane is None else lane * nodes + links.node,
        )
        options |= {"division": division, "residual_dtype": torch.float32, "reversible": True}
        super().__init__(links.inside if links.between is None else links.between, numel, codec, **options)
        self._passes_on_flags = lane is not None
        lane_numel = self.shard * nodes
        self.worker_place = slice(0, 0) if lane is None else slice(lane * lane_numel, (lane + 1) * lane_numel)
        self.takes_encoder = False  # what leaves is the node's sum
        self._passed_on = 0

    @override
    def start(self, step: int, flags: Flags = Flags.NONE, settings: int = 0, encode: EncodePart | None = None) -> None:
        assert encode is None, "what is encoded is the node's sum"
        links = self._links
        mine = torch.empty(1, HEADER_BYTES, dtype=torch.uint8, device=self._device)
        before = None if links.lane is None else self._free if self._next is None else self._next
        self._expect(step, settings)
        write_headers(mine, self._expected.pack(0, flags))
        neighbours = torch.empty(links.inside.size, HEADER_BYTES, dtype=torch.uint8, device=self._device)
        links.inside.all_gather(neighbours, mine)
        told = Headers(neighbours, 0, links.inside.global_ranks)
        total, payload = links.add_up(self.payload, before), self.payload if self.keeps_payload else None
        if links.lane is None:
            self._next = self.worker_residual
        else:
            self._payload, self._free = total, None
            super().start(step, flags, settings, self._encoder(told))
            self._next = total
        self._payload = payload
        self._headers.append(told)
        self._passed_on = 0

    @override
    def advance(self, adjust: Adjust | None = None) -> None:
        if self._links.lane is not None:
            super().advance(adjust)

    @override
    def wait(self) -> None:
        # Then share inside the node what leg 2 brought.
        links = self._links
        senders = [links.global_ranks[ranks[lane]] for lane in range(links.lanes) for ranks in links.groups.members]
        for number in range(len(self.parts)):
            if links.lane is None:
                mine = self._packets(links.num_nodes, number).zero_()
            else:
                self.brought[number].work.wait()
                mine = self.brought[number].received
            everyone = mine.new_empty(links.inside.size * mine.shape[0], mine.shape[1])
            work = links.inside.all_gather(everyone, mine)
            packets = everyone[: len(senders)]
            headers = packets[:, :HEADER_BYTES]
            kept = headers.clone() if self._device.type == "cpu" else headers
            self._headers.append(Headers(kept, number, senders))
            self.brought[number : number + 1] = [Leg(mine, packets, work)]

    @override
    def _pass_on_flags(self, packets: Tensor) -> None:
        # What headers told this rank, maybe alone, goes on to every rank.
        read, self._passed_on = self._headers[self._passed_on :], len(self._headers)
        self._tell(packets, read)

    def _encoder(self, told: Headers) -> EncodePart | None:
        """What encodes the node's sum, if it does more than that; `told`: what headers inside the node said."""
        del told
        return None

    def _tell(self, packets: Tensor, read: Sequence[Headers]) -> None:
        known = Flags.NONE
        for headers in read:
            if headers.raw.device.type != "cpu":
                pass_on_flags(packets, flags_on_device(headers.raw, self._expected.pack(headers.part)))
                continue
            try:
                known |= headers.check(self._expected)
            except SettingsError:
                known |= Flags.SETTINGS
            except PacketError:
                known |= Flags.MISMATCH
        if known:
            pass_on_flags(packets, torch.tensor(int(known), dtype=torch.int16))


class NodesToOwners(ExchangeToOwners, HierarchicalExchange):
    """Leg 1 alone, by node. Its headers say what those inside the sender's node did, so that every rank knows all."""

    @override
    def _encoder(self, told: Headers) -> EncodePart:
        def encode(place: slice, packets: Tensor, header: bytes) -> None:
            self._encode_part(place, packets)
            write_headers(packets, header)
            self._tell(packets, [told])

        return encode


class NodesFromOwners(ExchangeFromOwners, HierarchicalExchange):
    """Leg 2 alone, by node."""


_Kind = TypeVar("_Kind", bound=Exchange)
_BY_NODE: dict[type[Exchange], Any] = {
    Exchange: HierarchicalExchange,
    ExchangeToOwners: NodesToOwners,
    ExchangeFromOwners: NodesFromOwners,
}


def make_exchange(
    kind: type[_Kind],
    comm: Communicator,
    links: NodeLinks | None,
    numel: int,
    codec: Codec,
    *,
    filled: Sequence[int] | None = None,
    **options: Any,
) -> _Kind:
    """Make an exchange of both legs, or one, over nodes where there are `links`, else over `comm`'s ranks as they are.

    `filled`: elements of each shard, from its start, beyond which nothing is sent; None sends padding too. `options`:
    those of `Exchange`.
    """
    made: _Kind = (
        kind(comm, numel, codec, **options) if links is None else _BY_NODE[kind](links, numel, codec, **options)
    )
    if filled is not None:
        first, over = made.worker_place.start // made.shard, made._comm
        made.trim = Trim(codec, made.parts, filled[first : first + over.size], over.rank)
    return made
