"""Exact averages with fewer passes over memory than an exchange through a codec takes: values leave as they are, so
that nothing is lost, and nothing is kept of it."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.codecs import Codec
from thinwire.compress.exchange import Adjust, EncodePart, Exchange, Headers
from thinwire.compress.legs import of_part
from thinwire.compress.packet import HEADER_BYTES, Flags, all_finite, write_headers

__all__ = ["ExactExchange", "SoleExchange", "make_exact_exchange"]


class ExactExchange(Exchange):
    """An Exchange through the codec `none` without error feedback: the same packets, and the same average. `start`
    leaves the payload as it is, and the owner averages right into what it sends."""

    def __init__(
        self, comm: Communicator, numel: int, codec: Codec, *, bucket: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(comm, numel, codec, bucket=bucket, error_feedback=False, device=device)

    def advance(self, adjust: Adjust | None = None) -> None:
        """See Exchange."""
        assert self._leg_1, "advance() follows start()"
        for number, place in enumerate(self.parts):
            received = self._receive(number, self._leg_1.pop(0))
            send = self._packets(1, place)
            (average,) = _values(send)
            self.codec.decode_mean(received, average, self._valid_in(place))
            if adjust is not None:
                adjust(average, place)
            self._leg_2.append(self._send_average(number, send, place))

    def _encode_part(self, place: slice, packets: Tensor) -> None:
        _values(packets).copy_(self.payload.view(-1, self.shard)[:, place])


class SoleExchange(Exchange):
    """An ExactExchange of one rank, whose payload is the average: nothing is copied, and nothing leaves."""

    def __init__(
        self, comm: Communicator, numel: int, codec: Codec, *, bucket: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(comm, numel, codec, bucket=bucket, error_feedback=False, device=device)
        self._arrived = False

    def start(self, step: int, flags: Flags = Flags.NONE, settings: int = 0, encode: EncodePart | None = None) -> None:
        """See Exchange; what leg 1 would say is heard at once."""
        assert encode is None, "without residuals nothing takes an encoder"
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
    """The exchange that averages exactly over `comm`, with all of its ranks alike; `codec` is `none`."""
    kind = SoleExchange if comm.size == 1 else ExactExchange
    return kind(comm, numel, codec, bucket=bucket, device=device)


def _values(packets: Tensor) -> Tensor:
    """What packets of the codec `none` carry, fp32 [rows, shard]."""
    return packets[:, HEADER_BYTES:].view(torch.float32)
