"""deepspeed.accelerator.real_accelerator."""

from __future__ import annotations

from thinwire.deepspeed import accelerator

__all__ = ["get_accelerator"]

get_accelerator = accelerator.get_accelerator
