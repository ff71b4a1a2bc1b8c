"""The time at which everything that was asked of a device is done."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

__all__ = ["seconds_now"]

_initialized: Callable[[], bool] = torch.cuda.is_initialized


def seconds_now() -> float:
    """Seconds on the host's clock, once the GPU, where one is in use, has done what it was asked for."""
    if _initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
