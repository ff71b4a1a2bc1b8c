"""deepspeed.utils.groups: there is one group, of all ranks."""

from __future__ import annotations

import torch.distributed as dist

from thinwire.deepspeed import comm

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
]


def get_data_parallel_group() -> dist.ProcessGroup | None:
    """torch's group of all ranks."""
    return comm.get_world_group()


def get_data_parallel_rank() -> int:
    """This rank's number."""
    return comm.get_rank()


def get_data_parallel_world_size() -> int:
    """How many ranks there are."""
    return comm.get_world_size()


def get_model_parallel_rank() -> int:
    """0: models are not split."""
    return 0


def get_model_parallel_world_size() -> int:
    """1: models are not split."""
    return 1
