"""Finds who else knows that a backward only adds up: Hugging Face's Accelerate, whose `accumulate()` holds back nothing
but DistributedDataParallel."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import torch

__all__ = ["find_accumulation"]


def find_accumulation(optimizer: torch.optim.Optimizer) -> Callable[[], bool] | None:
    """What says whether the running backward is the last one before a step of `optimizer`; None where nobody knows.

    Looks at all objects of the process, once, as an optimizer does not know who has wrapped it.
    """
    wrapper = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    if wrapper is None:
        return None
    for one in [one for one in gc.get_objects() if issubclass(type(one), wrapper)]:
        inner = one
        while isinstance(inner, wrapper):
            inner = getattr(inner, "optimizer", None)
        if inner is optimizer:
            state = one.gradient_state
            return lambda: bool(state.sync_gradients)
    return None
