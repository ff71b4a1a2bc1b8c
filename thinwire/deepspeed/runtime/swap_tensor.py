"""deepspeed.runtime.swap_tensor: thinwire does not swap to NVMe. The smallest size that DeepSpeed swaps, in bytes."""

from __future__ import annotations

__all__ = ["MIN_SWAPPABLE_BYTES"]

MIN_SWAPPABLE_BYTES = 1 << 20
