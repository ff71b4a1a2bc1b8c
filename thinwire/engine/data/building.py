"""Builds a job's data loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thinwire.comm import Communicator
from thinwire.engine.config import EngineConfig
from thinwire.engine.data.loader import ResumableLoader

__all__ = ["make_loader"]


def make_loader(
    dataset: Any,
    config: EngineConfig,
    comm: Communicator,
    device: torch.device,
    *,
    batch_size: int | None = None,
    shuffle: bool = True,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = True,
) -> ResumableLoader:
    """A loader over `dataset` as the configuration says; collective. `batch_size`: of a rank, where not the
    configuration's. Raises what ResumableLoader raises."""
    return ResumableLoader(
        dataset,
        config.train_micro_batch_size_per_gpu if batch_size is None else batch_size,
        comm,
        shuffle=shuffle,
        seed=config.seed,
        drop_last=config.dataloader_drop_last,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory and device.type == "cuda",
    )
