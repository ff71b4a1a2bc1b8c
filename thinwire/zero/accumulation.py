"""Finds who else knows that a backward only adds up: Hugging Face's Accelerate, whose `accumulate()` holds back nothing
but DistributedDataParallel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["find_accumulation", "wrapper_classes"]


def wrapper_classes() -> list[type]:
    """What wraps optimizers and knows, where this process has imported it."""
    wrapper = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    return [] if wrapper is None else [wrapper]


def find_accumulation(optimizer: torch.optim.Optimizer, wrappers: Iterable[Any]) -> Callable[[], bool] | None:
    """What says whether the running backward is the last one before a step of `optimizer`; None where nobody knows.

    `wrappers`: instances of `wrapper_classes()`; others are passed over.
    """
    kinds = tuple(wrapper_classes())
    for one in wrappers:
        inner = one
        while issubclass(type(inner), kinds):
            inner = getattr(inner, "optimizer", None)
        if inner is not one and inner is optimizer:
            state = one.gradient_state
            return lambda: bool(state.sync_gradients)
    return None
