"""Floor 4, who sends what when: 1-bit Adam, 1-bit LAMB and 0/1 Adam, with their state on every rank or sharded."""

from __future__ import annotations

from thinwire.optim.adam.optimizers import OneBitAdam
from thinwire.optim.adam.sharded import ShardedOneBitAdam
from thinwire.optim.lamb.optimizers import OneBitLamb
from thinwire.optim.lamb.sharded import ShardedOneBitLamb
from thinwire.optim.sharded.full_optimizer import ShardedZeroOneAdam
from thinwire.optim.sharded.packed_optimizer import ReplicaDriftError
from thinwire.optim.zero_one.optimizers import ZeroOneAdam

__all__ = [
    "OneBitAdam",
    "OneBitLamb",
    "ReplicaDriftError",
    "ShardedOneBitAdam",
    "ShardedOneBitLamb",
    "ShardedZeroOneAdam",
    "ZeroOneAdam",
]
