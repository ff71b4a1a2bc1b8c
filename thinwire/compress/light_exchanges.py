"""Exchanges that take less than an `Exchange` that keeps fp32 residuals: less memory (`LowMemoryExchange`), for exact
averages fewer passes over it (`ExactExchange`), or one leg of the two."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.compress.codecs import CastCodec, Codec, all_finite
from thinwire.compress.exchange import Adjust, EncodePart, Exchange
from thinwire.compress.packet import Flags, Headers, write_headers
from thinwire.compress.packet_layout import HEADER_BYTES


class PacketsExchange(Exchange):
    """An Exchange whose result can be kept as leg 2's packets."""

    def take_packets(self) -> Tensor:
        """What leg 2 brought, uint8 [shards, packet_bytes], instead of `read`."""
        assert self._leg_2, "take_packets() follows wait()"
        legs, self._leg_2 = self._leg_2, []
        return legs[0].received if len(legs) == 1 else self.codec.join([leg.received for leg in legs])

    def arrived(self, row: int) -> list[Tensor]:
        """What leg 2 brought from one owner, uint8 [1, packet_bytes] for each part; after `wait`."""
        return [leg.received[row : row + 1] for leg in self._leg_2]


class LowMemoryExchange(PacketsExchange):
    """An Exchange whose result may stay packets, and whose worker residual is in `residual_dtype`.

    With `reversible`, the residuals before this step are kept until `commit` or `revert`, at the price of a second
    worker residual: then a skipped step leaves them untouched, and `scale_step` can shrink what the step did to them.
    Without, a step that is not applied leaves a worker residual of zeros.
    """

    def __init__(
        self,
        comm: Communicator,
        numel: int,
        codec: Codec,
        *,
        bucket: int,
        device: torch.device,
        residual_dtype: torch.dtype,
        reversible: bool,
        part: int | None = None,
    ) -> None:
        super().__init__(comm, numel, codec, bucket=bucket, error_feedback=False, device=device, part=part)
        self.takes_encoder = codec.has_kernels and reversible and residual_dtype == torch.float32
        self.worker_residual = torch.zeros(self.padded_numel, dtype=residual_dtype, device=device)
        self.owner_residual = torch.zeros(self.shard, device=device)
        self.reversible = reversible
        self._next: Tensor | None = None

    @override
    def start(self, step: int, flags: Flags = Flags.NONE, settings: int = 0, encode: EncodePart | None = None) -> None:
        # The payload's memory goes, or becomes the residual. Without `reversible` the next residual is the residual.
        assert self.worker_residual is not None
        if self.worker_residual.dtype == torch.float32 and encode is None:
            self._next = self.payload
        else:
            self._next = torch.empty_like(self.worker_residual) if self.reversible else self.worker_residual
        super().start(step, flags, settings, encode)
        self._payload = None
        if not self.reversible:
            self.worker_residual, self._next = self._next, None

    @override
    def commit(self) -> None:
        assert self._average is not None, "commit() follows wait()"
        if self._next is not None:
            self.worker_residual, self._next = self._next, None
        self.owner_residual, self._average = self._average, None

    @override
    def revert(self) -> None:
        # A residual that was not kept starts again from zero: it holds this step's, however large, by now.
        self._payload = None
        if self._average is None:
            return
        if self._next is None and self.worker_residual is not None:
            self.worker_residual.zero_()
        self._next = self._average = None

    @property
    @override
    def next_residual(self) -> Tensor:
        assert self._next is not None, "a step that is scaled needs a reversible exchange, after start()"
        return self._next

    @override
    def _encode_part(self, place: slice, packets: Tensor) -> None:
        if self._next is self.payload:
            super()._encode_part(place, packets)
            return
        assert self.worker_residual is not None
        assert self._next is not None
        payload, before, after = (
            vector.view(-1, self.shard)[:, place] for vector in (self.payload, self.worker_residual, self._next)
        )
        self.codec.encode_rounded(payload, before, after, packets, self.numel - place.start)


# Exact averages with fewer passes over memory than an exchange that keeps residuals takes: values leave as they are,
# or rounded to 16 bits, and nothing is kept of what that loses.


class ExactExchange(Exchange):
    """An Exchange through a codec that casts, without error feedback: the same packets, and the same average. `start`
    leaves the payload as it is, or takes gradients in its place; the owner averages fp32 right into what it sends."""

    takes_gradients: ClassVar[bool] = True
    codec: CastCodec

    def __init__(
        self, comm: Communicator, numel: int, codec: CastCodec, *, bucket: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(comm, numel, codec, bucket=bucket, error_feedback=False, device=device)

    @override
    def advance(self, adjust: Adjust | None = None) -> None:
        assert self._leg_1, "advance() follows start()"
        for number, place in enumerate(self.parts):
            received = self._receive(number)
            send = self._packets(1, number)
            (sent,) = self.codec.values(send)
            average = sent if sent.dtype == torch.float32 else torch.empty(len(sent), device=self._device)
            self.codec.decode_mean(received, average, self._part_valid[number])
            if adjust is not None:
                adjust(average, place)
            if average is not sent:
                sent.copy_(average)
            self._send_average(number, send)

    @override
    def _encode_part(self, place: slice, packets: Tensor) -> None:
        self.codec.values(packets).copy_(self.payload.view(-1, self.shard)[:, place])


class SoleExchange(Exchange):
    """An ExactExchange of one rank and fp32, whose payload is the average: nothing is copied, and nothing leaves."""

    def __init__(
        self, comm: Communicator, numel: int, codec: Codec, *, bucket: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(comm, numel, codec, bucket=bucket, error_feedback=False, device=device)
        self._arrived = False

    @override
    def start(self, step: int, flags: Flags = Flags.NONE, settings: int = 0, encode: EncodePart | None = None) -> None:
        assert encode is None, "the payload is the average"
        self._expect(step, settings)
        self._arrived = False
        self._add_header(flags, True)

    @override
    def advance(self, adjust: Adjust | None = None) -> None:
        if adjust is not None:
            adjust(self.payload, slice(0, self.shard))
        self._add_header(Flags.NONE, all_finite(self.payload))

    @override
    def wait(self) -> None:
        self._arrived = True

    @property
    @override
    def leg_1_is_over(self) -> bool:
        return True

    @property
    @override
    def has_arrived(self) -> bool:
        return self._arrived

    @override
    def read(self, output: Tensor) -> None:
        assert self._arrived, "read() follows wait()"
        self._arrived = False
        if output.data_ptr() != self.payload.data_ptr():
            output.copy_(self.payload)

    def _add_header(self, flags: Flags, finite: bool | Tensor) -> None:
        """Have `outcome` find what a leg's packet would say."""
        header = torch.empty(1, HEADER_BYTES, dtype=torch.uint8, device=self._device)
        write_headers(header, self._expected.pack(0, flags), finite)
        self._headers.append(Headers(header, 0))


def make_exact_exchange(
    comm: Communicator, numel: int, codec: Codec, *, bucket: int, device: torch.device | str = "cpu"
) -> Exchange:
    """The exchange that averages over `comm`, with all of its ranks alike, and keeps no residuals; `codec` casts."""
    assert isinstance(codec, CastCodec), "nothing else is averaged exactly"
    if comm.size == 1 and codec.name == "none":
        return SoleExchange(comm, numel, codec, bucket=bucket, device=device)
    return ExactExchange(comm, numel, codec, bucket=bucket, device=device)


# One leg each, where something happens to an average between them that only its owner does


class ExchangeToOwners(Exchange):
    """Leg 1 alone: owners keep the average of their shards, `average_of_own`, fp32 [shard], until the next `start`."""

    def __init__(self, *between: Any, **options: Any) -> None:
        super().__init__(*between, **options)
        self.owner_residual = None
        self.average_of_own = torch.empty(self.shard, device=self._device)

    @override
    def advance(self, adjust: Adjust | None = None) -> None:
        assert adjust is None, "owners do that"
        for number, place in enumerate(self.parts):
            received = self._receive(number)
            self.codec.decode_mean(received, self.average_of_own[place], self._part_valid[number])

    @override
    def wait(self) -> None:
        """Return at once: what leg 1 brought is there since `advance`."""


class ExchangeFromOwners(Exchange):
    """Leg 2 alone, without error feedback: `start_from_owners`, `wait`, `outcome`, `read`."""

    def __init__(self, *between: Any, **options: Any) -> None:
        super().__init__(*between, error_feedback=False, **options)

    def start_from_owners(self, own: Tensor, step: int) -> None:
        """Encode `own`, fp32 [shard], and send it to every rank. It becomes what the codec lost."""
        self._expect(step, 0)
        for number, place in enumerate(self.parts):
            send = self._packets(1, number)
            self.codec.encode(own[place], None, send, self._part_valid[number])
            self._send_average(number, send)
