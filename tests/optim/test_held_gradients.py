"""What is cast from held gradients into packets is what a payload written from them would have carried."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from thinwire.comm import Communicator, threads
from thinwire.compress import make_codec
from thinwire.compress.codecs import CodecName
from thinwire.compress.light_exchanges import ExactExchange
from thinwire.compress.packet import Header
from thinwire.optim.wire import cast_gradients
from thinwire.zero import BucketLayout, Slot

BLOCK = 64


def layout_of(seed: int, ranks: int) -> BucketLayout:
    """Some slots empty, some with room in between."""
    chosen = random.Random(seed)
    slots, end = [], 0
    for parameter in range(chosen.randint(1, 7)):
        end += chosen.choice((0, 0, 5))
        slots.append(Slot(parameter, end, chosen.choice((0, 1, 63, 200, 300))))
        end += slots[-1].numel
    return BucketLayout(tuple(slots), ranks, BLOCK)


def packets_of(comm: Communicator, layout: BucketLayout, codec: CodecName, divisor: float) -> tuple[Tensor, Tensor]:
    """All parts' packets: from the gradients, and from a payload."""
    made = make_codec(codec, BLOCK)
    exchange = ExactExchange(comm, layout.numel, made, bucket=2)  # type: ignore[arg-type]
    gradients = {}
    for slot in layout.slots:
        gradient = torch.randn(slot.numel, generator=torch.Generator().manual_seed(slot.parameter))
        if slot.parameter % 3 != 1:
            gradients[slot.parameter] = gradient
            exchange.payload[slot.offset : slot.offset + slot.numel] = gradient / divisor
    cast = cast_gradients(exchange, layout, gradients, divisor)
    header = Header(made.identifier, BLOCK, 2, step=9).pack()
    found, wanted = [], []
    for place in (slice(0, BLOCK), slice(BLOCK, exchange.shard)) if exchange.shard > BLOCK else (slice(0, BLOCK),):
        packets = torch.full((comm.size, made.packet_bytes(place.stop - place.start)), 0xA5, dtype=torch.uint8)
        cast(place, packets, header)
        found.append(packets.view(-1))
        other = torch.zeros_like(packets)
        made.values(other).copy_(exchange.payload.view(comm.size, -1)[:, place])  # type: ignore[attr-defined]
        other[:, :16] = packets[0, :16]
        wanted.append(other.view(-1))
        assert packets[:, :16].eq(torch.frombuffer(bytearray(header), dtype=torch.uint8)).all()
    return torch.cat(found), torch.cat(wanted)


@pytest.mark.parametrize("codec", ["none", "bf16", "fp16"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_cast_is_what_a_payload_would_carry(codec: CodecName, ranks: int) -> None:
    def rank(comm: Communicator) -> None:
        for seed in range(20):
            for divisor in (1.0, 3.0):
                found, wanted = packets_of(comm, layout_of(seed, ranks), codec, divisor)
                assert torch.equal(found, wanted)

    threads.run(rank, ranks)
