"""Floor 2, what is sent: codecs and their kernels, packets, the two-leg exchange with error feedback, the DDP hook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.lazy_imports import lazy_exports

__all__ = [
    "Codec",
    "CompressionState",
    "Exchange",
    "Flags",
    "FsdpHooks",
    "Header",
    "Outcome",
    "PacketError",
    "ddp_hook",
    "fsdp_hooks",
    "make_codec",
]

# A plan reads the sizes of packets where there is no torch yet.
if TYPE_CHECKING:
    from thinwire.compress.codecs import Codec, make_codec
    from thinwire.compress.data_parallel_hook import CompressionState, ddp_hook
    from thinwire.compress.exchange import Exchange
    from thinwire.compress.fully_sharded import FsdpHooks, fsdp_hooks
    from thinwire.compress.packet import Flags, Header, Outcome, PacketError
else:
    __getattr__, __dir__ = lazy_exports(__name__)
