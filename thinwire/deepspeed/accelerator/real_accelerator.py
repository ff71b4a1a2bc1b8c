"""deepspeed.accelerator.real_accelerator."""

from __future__ import annotations

from functools import cache

from thinwire.deepspeed.accelerator.cpu import CpuAccelerator
from thinwire.deepspeed.accelerator.cuda import CudaAccelerator
from thinwire.deepspeed.accelerator.shared import Accelerator

__all__ = ["get_accelerator", "is_current_accelerator_supported"]


@cache
def get_accelerator() -> Accelerator:
    """The device of this process: CUDA where torch finds one, else the CPU."""
    return CudaAccelerator() if CudaAccelerator.found() else CpuAccelerator()


def is_current_accelerator_supported() -> bool:
    """Always: thinwire runs on both."""
    return True
