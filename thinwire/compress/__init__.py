"""Floor 3, what is sent: codecs and their kernels, packets, the two-leg exchange with error feedback, and the
optimizers and hooks that use it."""

from __future__ import annotations

from thinwire.compress.codecs import Codec, make_codec
from thinwire.compress.ddp_hook import CompressionState, ddp_hook
from thinwire.compress.exchange import Exchange, Outcome
from thinwire.compress.onebit_adam import OneBitAdam
from thinwire.compress.onebit_lamb import OneBitLamb
from thinwire.compress.packet import Flags, Header, PacketError
from thinwire.compress.sharded_onebit_adam import ShardedOneBitAdam
from thinwire.compress.sharded_onebit_lamb import ShardedOneBitLamb
from thinwire.compress.sharded_onebit_optimizer import ReplicaDriftError
from thinwire.compress.sharded_zero_one_adam import ShardedZeroOneAdam
from thinwire.compress.zero_one_adam import ZeroOneAdam

__all__ = [
    "Codec",
    "CompressionState",
    "Exchange",
    "Flags",
    "Header",
    "OneBitAdam",
    "OneBitLamb",
    "Outcome",
    "PacketError",
    "ReplicaDriftError",
    "ShardedOneBitAdam",
    "ShardedOneBitLamb",
    "ShardedZeroOneAdam",
    "ZeroOneAdam",
    "ddp_hook",
    "make_codec",
]
