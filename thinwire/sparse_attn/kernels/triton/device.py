"""Where Triton's kernels run: on the GPU that holds the tensors, whichever is current, and what that GPU can do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["capability", "guard", "where_its_tensor_is"]

P = ParamSpec("P")
R = TypeVar("R")

_WITHOUT_A_GPU = (8, 0)  # for Triton's interpreter, which runs on CPU tensors


def guard(tensor: Tensor) -> AbstractContextManager[Any]:
    """Makes `tensor`'s GPU the current one meanwhile: Triton launches there, and allocates and compiles for it."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def where_its_tensor_is(launch: Callable[P, R]) -> Callable[P, R]:
    """Run `launch` on the GPU of its first argument."""

    @functools.wraps(launch)
    def guarded(*arguments: P.args, **settings: P.kwargs) -> R:
        first = arguments[0]
        assert isinstance(first, Tensor)
        with guard(first):
            return launch(*arguments, **settings)

    return guarded


def capability(tensor: Tensor) -> tuple[int, int]:
    """Of the GPU that holds `tensor`: (8, 0) for sm_80."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else _WITHOUT_A_GPU
