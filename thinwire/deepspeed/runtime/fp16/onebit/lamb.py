"""deepspeed.runtime.fp16.onebit.lamb."""

from __future__ import annotations

from thinwire.optim import OneBitLamb as OnebitLamb

__all__ = ["OnebitLamb"]
