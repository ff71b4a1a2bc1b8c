"""Floor 4, who sends what when: algorithms, the two homes of their state, and the public class of each."""

from __future__ import annotations

from thinwire.optim.adam.optimizer import OneBitAdam
from thinwire.optim.lamb.optimizer import OneBitLamb
from thinwire.optim.lion import OneBitLion
from thinwire.optim.replicas import ReplicaDriftError
from thinwire.optim.zero_one.optimizer import ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitLamb", "OneBitLion", "ReplicaDriftError", "ZeroOneAdam"]
