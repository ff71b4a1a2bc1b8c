"""deepspeed.runtime.fp16.onebit.zoadam."""

from __future__ import annotations

from thinwire.optim import ZeroOneAdam

__all__ = ["ZeroOneAdam"]
