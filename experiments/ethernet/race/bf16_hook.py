"""torch's own bf16 hook on CPUs: DDP refuses it there by its name, though Gloo averages bf16 well."""

# No postponed annotations: DDP compares them with the types themselves.

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

__all__ = ["bf16_hook"]


def bf16_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Averages a bucket in bf16: `default_hooks.bf16_compress_hook`, over the job's default process group."""
    assert dist.group.WORLD is not None, "DDP is made in a process group"
    return default_hooks.bf16_compress_hook(dist.group.WORLD, bucket)
