"""Checks of what is given to a collective, in one place, so that all backends refuse the same things.

A wrong argument must fail at the call, before any rank sends: afterwards it can only hang or corrupt.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = ["ReduceOp", "check_pair", "check_rank", "check_reduction", "check_tensor", "check_timeout"]

ReduceOp = Literal["sum", "mean", "max", "min"]

_REDUCIBLE = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)


def check_tensor(collective: str, name: str, tensor: Tensor) -> None:
    """Refuse what has no flat, dense memory: TypeError for non-tensors, ValueError for the rest."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{collective}: {name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{collective}: {name} has layout {tensor.layout}; make it dense with .to_dense()")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{collective}: {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
            "contiguous; pass a .contiguous() copy, and copy the result back if it is an output"
        )


def check_pair(collective: str, output: Tensor, input: Tensor, output_numel: int) -> None:
    """Check an output and an input: both dense and contiguous, one dtype, one device, ``output_numel``."""
    check_tensor(collective, "output", output)
    check_tensor(collective, "input", input)
    if output.dtype != input.dtype:
        raise TypeError(f"{collective}: output is {output.dtype} but input is {input.dtype}; use one dtype")
    if output.device != input.device:
        raise ValueError(f"{collective}: output is on {output.device} but input is on {input.device}")
    if output.numel() != output_numel:
        raise ValueError(
            f"{collective}: output has {output.numel()} elements, expected {output_numel} "
            f"for an input of {input.numel()}"
        )
    if _overlap(output, input):
        raise ValueError(f"{collective}: output and input share memory; give it two separate tensors")


def check_reduction(tensor: Tensor, op: str) -> None:
    """Check that every backend can reduce this dtype with this op."""
    if op not in get_args(ReduceOp):
        raise ValueError(f"all_reduce: unknown op {op!r}; expected one of {', '.join(get_args(ReduceOp))}")
    if tensor.dtype not in _REDUCIBLE:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in _REDUCIBLE)
        raise TypeError(f"all_reduce: cannot reduce {tensor.dtype}; supported are {supported}")
    if op == "mean" and not tensor.is_floating_point():
        raise TypeError(f"all_reduce: mean of {tensor.dtype} is not exact; use 'sum', or convert to a float")


def check_rank(collective: str, root: int, size: int) -> None:
    """Check that ``root`` is a rank of a communicator of ``size``."""
    if isinstance(root, bool) or not isinstance(root, int):
        raise TypeError(f"{collective}: root must be an int, not {type(root).__name__}")
    if not 0 <= root < size:
        raise ValueError(f"{collective}: root is {root}, expected 0 to {size - 1}")


def check_timeout(timeout: float) -> None:
    """Check that a timeout is a positive number of seconds."""
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")


def _overlap(left: Tensor, right: Tensor) -> bool:
    if left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr():
        return False
    left_end = left.data_ptr() + left.numel() * left.element_size()
    right_end = right.data_ptr() + right.numel() * right.element_size()
    return left.data_ptr() < right_end and right.data_ptr() < left_end
