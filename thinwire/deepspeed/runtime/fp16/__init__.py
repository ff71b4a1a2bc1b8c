"""deepspeed.runtime.fp16: the loss scale, and the 1-bit optimizers."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, ("fused_optimizer", "loss_scaler", "onebit", "unfused_optimizer"))
