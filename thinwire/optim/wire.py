"""The exchanges that buckets of an algorithm go through, and gradients as what an exact one sends."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.agreement import NodeLinks
from thinwire.compress.buddies import ExchangeWithBuddies
from thinwire.compress.codecs import CastCodec, make_codec
from thinwire.compress.exchange import EncodePart, Exchange
from thinwire.compress.hierarchical_exchange import make_exchange
from thinwire.compress.light_exchanges import ExchangeToOwners, make_exact_exchange
from thinwire.compress.packet import write_headers
from thinwire.compress.packet_layout import shard_numel
from thinwire.optim.options import COMPRESSED_WIRES, HomeOptions
from thinwire.zero import BucketLayout, Slot


class Wire:
    """Exchanges over the ranks of `comm`, or by node where there are `links`, through the codecs of `options`.

    `residual_dtypes`: where state is sharded, those of the worker's residuals, by bucket, of what does not go by node.
    `decisions`: over which ranks agree on numbers that a step is applied by, once all of it is here, if ranks change;
    buckets of what `changes` have room to be cut for others.
    """

    def __init__(
        self,
        comm: Communicator,
        options: HomeOptions,
        links: NodeLinks | None = None,
        residual_dtypes: Sequence[torch.dtype] = (),
        decisions: Communicator | None = None,
    ) -> None:
        self.comm = comm
        self.decisions = comm if decisions is None else decisions
        self.changes = decisions is not None
        self.codec = make_codec(options.codec, options.block_size)
        self.ranks = comm.size
        self._exact_codec = make_codec(options.exact_codec, options.block_size)
        self.rounds_averages = options.warmup_wire in COMPRESSED_WIRES
        self._links, self._owned = links, options.owned
        self._residual_dtypes = residual_dtypes

    def padded_numel(self, layout: BucketLayout) -> int:
        """Elements of what an exchange of this bucket takes: a layout by nodes is padded otherwise than one by
        ranks."""
        shards = self.ranks if self._links is None else self._links.lanes * self._links.num_nodes
        return shards * shard_numel(layout.numel, shards, layout.block_size)

    def exact(self, layout: BucketLayout, index: int, device: torch.device, *, to_owners: bool = False) -> Exchange:
        """Make an average of gradients: exact, or rounded with error feedback through a codec of blocks, and then for
        all, or `to_owners` alone."""
        codec, rounds, numel = self._exact_codec, self.rounds_averages, layout.numel
        given: dict[str, Any] = {"bucket": index, "device": device}
        if self._owned is not None and layout.whole:
            there, back = (make_codec(name, layout.block_size) for name in self._owned.codecs)
            made = ExchangeWithBuddies(self.comm, numel, there, back, gaps=layout.gaps, **given)
            made.skip_padding(layout.filled)
            if self._owned.low_rank:
                matrices = [(slot.offset, self._owned.shapes[slot.parameter]) for slot in layout.slots]
                made.send_apart(matrices, self._owned.low_rank)
            return made
        if to_owners:
            return make_exchange(ExchangeToOwners, self.comm, self._links, numel, codec, **given)
        if self._links is None and not rounds:
            return make_exact_exchange(self.comm, numel, codec, **given)
        return make_exchange(Exchange, self.comm, self._links, numel, codec, error_feedback=rounds, **given)

    def compressed(
        self, layout: BucketLayout, index: int, device: torch.device, *, reversible: bool = True
    ) -> Exchange:
        """Make one through the codec, with error feedback; where state is sharded one that keeps no payload, and that
        need not be `reversible`: by node it is."""
        given: dict[str, Any] = {"bucket": index, "device": device}
        if self._residual_dtypes:
            given |= {"residual_dtype": self._residual_dtypes[index], "reversible": reversible, "keeps_payload": False}
        return make_exchange(Exchange, self.comm, self._links, layout.numel, self.codec, grows=self.changes, **given)


def cast_gradients(
    exchange: Exchange, layout: BucketLayout, gradients: Mapping[int, Tensor], divisor: float
) -> EncodePart:
    """What casts a part of a bucket's `gradients`, by parameter, over `divisor` into packets, and zeros if there are
    none."""
    codec = exchange.codec
    assert isinstance(codec, CastCodec), "nothing else carries gradients as they are"
    flat = {number: gradient.view(-1) for number, gradient in gradients.items()}
    ends = [slot.offset + slot.numel for slot in layout.slots]

    def cast(place: slice, packets: Tensor, header: bytes) -> None:
        places, pieces = [], []
        for row, values in enumerate(codec.values(packets)):
            begin = row * exchange.shard + place.start
            for first, last, slot in _pieces(layout.slots, ends, begin, begin + len(values)):
                gradient = None if slot is None else flat.get(slot.parameter)
                target = values[first - begin : last - begin]
                if slot is None or gradient is None:
                    target.zero_()
                else:
                    piece = gradient[first - slot.offset : last - slot.offset]
                    places.append(target)
                    pieces.append(piece if divisor == 1.0 else piece.float() / divisor)
        if places:
            torch._foreach_copy_(places, pieces)
        write_headers(packets, header)

    return cast


def _pieces(slots: Sequence[Slot], ends: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, Slot | None]]:
    """Elements begin to end of a bucket, run by run: first, last, and the slot, None where there is none."""
    for slot in slots[bisect_right(ends, begin) :]:
        start, stop = slot.offset, min(slot.offset + slot.numel, end)
        if begin < min(start, end):
            yield begin, min(start, end), None
        if start < stop:
            yield max(begin, start), stop, slot
        begin = max(begin, stop)
        if begin == end:
            return
    yield begin, end, None
