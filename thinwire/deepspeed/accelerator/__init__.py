"""deepspeed.accelerator: the device that ranks compute on, CPU or CUDA."""

from __future__ import annotations

from thinwire.deepspeed.accelerator.real_accelerator import get_accelerator, is_current_accelerator_supported

__all__ = ["get_accelerator", "is_current_accelerator_supported"]
