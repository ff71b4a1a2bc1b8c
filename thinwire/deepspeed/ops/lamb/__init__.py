"""deepspeed.ops.lamb: LAMB, which an engine steps on the ranks that own whole parameters."""

from __future__ import annotations

from thinwire.optim import Lamb as FusedLamb

__all__ = ["FusedLamb"]
