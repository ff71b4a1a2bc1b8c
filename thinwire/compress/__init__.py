"""Floor 3, what is sent: codecs and their kernels, packets, the two-leg exchange with error feedback, the DDP hook."""

from __future__ import annotations

from thinwire.compress.codecs import Codec, make_codec
from thinwire.compress.ddp_hook import CompressionState, ddp_hook
from thinwire.compress.exchange import Exchange, Outcome
from thinwire.compress.packet import Flags, Header, PacketError

__all__ = [
    "Codec",
    "CompressionState",
    "Exchange",
    "Flags",
    "Header",
    "Outcome",
    "PacketError",
    "ddp_hook",
    "make_codec",
]
