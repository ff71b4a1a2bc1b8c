"""Exact averages with fewer passes over memory than an exchange that keeps residuals takes: values leave as they are,
or rounded to 16 bits, and nothing is kept of what that loses."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.codecs import CastCodec, Codec
from thinwire.compress.exchange import Adjust, EncodePart, Exchange, Headers
from thinwire.compress.legs import of_part
from thinwire.compress.packet import HEADER_BYTES, Flags, all_finite, write_headers

__all__ = ["ExactExchange", "SoleExchange", "make_exact_exchange"]


class ExactExchange(Exchange):
    """An Exchange through a codec that casts, without error feedback: the same packets, and the same average. `start`
    leaves the payload as it is, or takes gradients in its place; the owner averages fp32 right into what it sends."""

    takes_gradients: ClassVar[bool] = True
    codec: CastCodec

    def __init__(
        self, comm: Communicator, numel: int, codec: CastCodec, *, bucket: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(comm, numel, codec, bucket=bucket, error_feedback=False, device=device)

    def advance(self, adjust: Adjust | None = None) -> None:
        """See Exchange."""
        assert self._leg_1, "advance() follows start()"
        for number, place in enumerate(self.parts):
            received = self._receive(number, self._leg_1.pop(0))
            send = self._packets(1, place)
            (sent,) = self.codec.values(send)
            average = sent if sent.dtype == torch.float32 else torch.empty(len(sent), device=self._device)
            self.codec.decode_mean(received, average, self._valid_in(place))
            if adjust is not None:
                adjust(average, place)
            if average is not sent:
                sent.copy_(average)
            self._leg_2.append(self._send_average(number, send, place))

    def _encode_part(self, place: slice, packets: Tensor) -> None:
        self.codec.values(packets).copy_(self.payload.view(-1, self.shard)[:, place])


class SoleExchange(Exchange):
    """An ExactExchange of one rank and fp32, whose payload is the average: nothing is copied, and nothing leaves."""

    def __init__(
        self, comm: Communicator, numel: int, codec: Codec, *, bucket: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(comm, numel, codec, bucket=bucket, error_feedback=False, device=device)
        self._arrived = False

    def start(self, step: int, flags: Flags = Flags.NONE, settings: int = 0, encode: EncodePart | None = None) -> None:
        """See Exchange; what leg 1 would say is heard at once."""
        assert encode is None, "the payload is the average"
        self._expect(step, settings)
        self._arrived = False
        self._hear(flags, True)

    def advance(self, adjust: Adjust | None = None) -> None:
        """See Exchange."""
        if adjust is not None:
            adjust(self.payload, slice(0, self.shard))
        self._hear(Flags.NONE, all_finite(self.payload))

    def wait(self) -> None:
        """See Exchange."""
        self._arrived = True

    @property
    def leg_1_is_over(self) -> bool:
        """See Exchange."""
        return True

    @property
    def has_arrived(self) -> bool:
        """See Exchange."""
        return self._arrived

    def read(self, output: Tensor) -> None:
        """See Exchange."""
        assert self._arrived, "read() follows wait()"
        self._arrived = False
        if output.data_ptr() != self.payload.data_ptr():
            output.copy_(self.payload)

    def _hear(self, flags: Flags, finite: bool | Tensor) -> None:
        header = torch.empty(1, HEADER_BYTES, dtype=torch.uint8, device=self._device)
        write_headers(header, of_part(self._expected, 0, flags), finite)
        self._headers.append(Headers(header, 0))


def make_exact_exchange(
    comm: Communicator, numel: int, codec: Codec, *, bucket: int, device: torch.device | str = "cpu"
) -> Exchange:
    """The exchange that averages over `comm`, with all of its ranks alike, and keeps no residuals; `codec` casts."""
    assert isinstance(codec, CastCodec), "nothing else is averaged exactly"
    if comm.size == 1 and codec.name == "none":
        return SoleExchange(comm, numel, codec, bucket=bucket, device=device)
    return ExactExchange(comm, numel, codec, bucket=bucket, device=device)
