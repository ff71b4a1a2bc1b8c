"""A number that differs, but for chance, where a bit of a tensor does."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["digest_of"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(tensor: Tensor) -> Tensor | int:
    """The sum of its words, to compare with those of tensors alike in form and device; from an accelerator on it.

    On a CPU by compiled code, where there is a compiler: calling torch's operators costs more than small gradients do.
    """
    word_sum = _compiled() if tensor.device.type == "cpu" and tensor.is_contiguous() else None
    return _sum_of_words(tensor) if word_sum is None else word_sum(tensor.data_ptr(), tensor.nbytes)


def _sum_of_words(tensor: Tensor) -> Tensor:
    """Words of 64 bits where the memory allows, which the processor adds as fast as it reads them."""
    size = tensor.element_size()
    per_word = 8 // size
    flat = tensor.detach() if tensor.requires_grad else tensor
    if flat.dim() and flat.is_contiguous() and not (flat.shape[-1] % per_word or flat.storage_offset() % per_word):
        return flat.view(torch.int64).sum()
    if not flat.is_contiguous() or flat.numel() < 2 * per_word:
        return flat.view(_WORDS[size]).sum(dtype=torch.int64)
    flat = flat.view(-1)
    first = -flat.storage_offset() % per_word
    last = first + (flat.numel() - first) // per_word * per_word
    total = flat[first:last].view(torch.int64).sum()
    for edge in (flat[:first], flat[last:]):
        if edge.numel():
            total += edge.view(_WORDS[size]).sum(dtype=torch.int64)
    return total


@functools.cache
def _compiled() -> Callable[[int, int], int] | None:
    try:
        found: Callable[[int, int], int] = importlib.import_module("thinwire.simd.word_sums").word_sum
    except ImportError:  # of which the kernels' backend has warned
        return None
    return found
