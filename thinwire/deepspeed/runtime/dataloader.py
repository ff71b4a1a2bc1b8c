"""deepspeed.runtime.dataloader."""

from __future__ import annotations

from thinwire.engine import RepeatingLoader
from thinwire.engine import ResumableLoader as DeepSpeedDataLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
