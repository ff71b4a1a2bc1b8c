"""fp32 values put into weights of 16 bits, rounded at random, alike on every rank: for weights that move by less than
their last bit."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.compress.kernels import reference

__all__ = ["store_rounded"]

_AT_ONCE = 1 << 20  # elements whose random bits, 8 bytes each in plain torch, are in memory


def store_rounded(weights: Tensor, values: Tensor, seed: int) -> None:
    """Write `values`, fp32 [n], into `weights`, fp32, bf16 or fp16 [n], contiguous and on the same device.

    16 bits get one of the two neighbours, the nearer the likelier, as in `apply_signs`: by bits that depend on `seed`
    and the element's number only. Equal arguments give equal bits on every rank and device. Infinities and NaN stay.

    Raises TypeError or ValueError for arguments that do not fit together.
    """
    if values.dtype != torch.float32 or weights.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"values must be fp32 and weights fp32, bf16 or fp16, got {values.dtype}, {weights.dtype}")
    if values.dim() != 1 or values.shape != weights.shape or values.device != weights.device:
        raise ValueError(
            f"values and weights must be vectors of one size on one device, got {tuple(values.shape)} on "
            f"{values.device} and {tuple(weights.shape)} on {weights.device}"
        )
    if not (values.is_contiguous() and weights.is_contiguous()):
        raise ValueError("values and weights must be contiguous: call contiguous()")
    if weights.device.type == "cpu" and (on_cpu := _cpu_kernel()) is not None:
        on_cpu(weights, values, seed)
        return
    for first in range(0, weights.numel(), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        reference.store_rounded(weights[part], values[part], seed, first)


@functools.cache
def _cpu_kernel() -> Callable[[Tensor, Tensor, int], None] | None:
    if importlib.util.find_spec("numba") is None:
        return None
    kernel: Callable[[Tensor, Tensor, int], None] = importlib.import_module(
        "thinwire.compress.kernels.cpu.backend"
    ).store_rounded
    return kernel
