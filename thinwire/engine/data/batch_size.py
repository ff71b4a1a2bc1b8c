"""Tells a training loop whose batches are not what the configuration says, before a whole run has been miscounted."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["first_dimension", "warn_of_another_size"]


def first_dimension(inputs: Any) -> int | None:
    """The length of the first tensor that has any dimension, in dicts, lists and tuples."""
    if isinstance(inputs, Tensor):
        return inputs.shape[0] if inputs.dim() else None
    values = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, list | tuple) else ()
    return next((size for size in map(first_dimension, values) if size is not None), None)


def warn_of_another_size(inputs: Any, expected: int, rank: int) -> None:
    """Warn where the samples in `inputs` are not the `expected` ones, so that counts cannot be right."""
    size = first_dimension(inputs)
    if size is not None and size != expected:
        warnings.warn(
            f"rank {rank} got a first batch of {size} samples, and train_micro_batch_size_per_gpu is {expected}: "
            f"samples are counted, and every rank's loss weighs, as if it were {expected}",
            RuntimeWarning,
            stacklevel=4,
        )
