"""deepspeed.runtime.fp16.onebit.adam."""

from __future__ import annotations

from thinwire.optim import OneBitAdam as OnebitAdam

__all__ = ["OnebitAdam"]
