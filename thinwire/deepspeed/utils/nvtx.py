"""deepspeed.utils.nvtx."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from thinwire.deepspeed.accelerator import get_accelerator

__all__ = ["instrument_w_nvtx"]


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Name the calls of a function for NVIDIA's profilers."""

    @wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return wrapped
