"""What keeps DistributedDataParallel from sending gradients that somebody else sends, and finds one that would."""

# No `from __future__ import annotations`: DDP inspects a hook's annotations, which must be the types themselves.
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

__all__ = ["find_ddp", "leave_gradients_alone"]


def find_ddp(models: Iterable[Any], parameters: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """Those of `models` that are a DistributedDataParallel and average the gradients of some of these parameters.

    DDP leaves no trace on parameters: `models` are all that `instances_of` finds.
    """
    wanted = {id(parameter) for parameter in parameters}
    return [
        one
        for one in models
        if issubclass(type(one), DistributedDataParallel)
        and any(id(parameter) in wanted for parameter in one.module.parameters())
    ]


def leave_gradients_alone(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP communication hook that sends nothing: somebody else synchronises."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
