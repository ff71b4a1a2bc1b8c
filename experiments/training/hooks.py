"""Hooks for DDP: torch's own in bf16, which DDP refuses by its name on CPUs, though Gloo averages bf16 well; and one
that averages nothing, whose steps are the least that a method can take whose ranks meet in every step."""

# No postponed annotations: DDP compares them with the types themselves.

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

__all__ = ["bf16_hook", "meeting_hook"]


def bf16_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Averages a bucket in bf16: `default_hooks.bf16_compress_hook`, over the job's default process group."""
    assert dist.group.WORLD is not None, "DDP is made in a process group"
    return default_hooks.bf16_compress_hook(dist.group.WORLD, bucket)


def meeting_hook(
    state: None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Leaves a bucket as it is, once all ranks have it: 4 bytes are added up."""
    met = dist.all_reduce(torch.zeros(1), async_op=True)
    assert met is not None
    return met.get_future().then(lambda _: bucket.buffer())
