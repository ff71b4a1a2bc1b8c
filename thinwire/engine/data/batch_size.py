"""Batch sizes of a job under way: how they change, and a word to loops whose batches are not what the configuration
says, before a whole run has been miscounted."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from thinwire.engine.config import EngineConfig
from thinwire.engine.config.batch import complete_batch_sizes

__all__ = ["first_dimension", "resized", "warn_of_another_size"]


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


def resized(
    config: EngineConfig, world_size: int, train_batch_size: int | None = None, micro_batch_size: int | None = None
) -> EngineConfig:
    """The configuration with another batch, by its micro-batches, or with other micro-batches, as many as before.

    Raises ValueError for what is no size, or no multiple of a micro-batch on every rank.
    """
    for name, size in (("train_batch_size", train_batch_size), ("micro_batch_size", micro_batch_size)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"{name} is a whole number of samples, at least 1, not {size!r}")
    if micro_batch_size is None:
        sizes = complete_batch_sizes(train_batch_size, config.train_micro_batch_size_per_gpu, None, world_size)
    else:
        sizes = complete_batch_sizes(None, micro_batch_size, config.gradient_accumulation_steps, world_size)
    changed = {
        "train_batch_size": sizes.train,
        "train_micro_batch_size_per_gpu": sizes.micro,
        "gradient_accumulation_steps": sizes.accumulation,
    }
    return config.model_copy(update=changed)
