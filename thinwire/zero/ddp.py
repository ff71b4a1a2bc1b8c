"""What keeps DistributedDataParallel from sending gradients that somebody else sends."""

# No `from __future__ import annotations`: DDP inspects a hook's annotations, which must be the types themselves.
import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

__all__ = ["leave_gradients_alone"]


def leave_gradients_alone(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP communication hook that sends nothing: somebody else synchronises."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
