"""Who the ranks are and what they commonly tell each other: by torch.distributed where it is initialised, else by the
communicator that thinwire finds, over MPI, in threads, or of a process on its own."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from thinwire import comm as communication
from thinwire.comm import Communicator, threads

__all__ = [
    "all_gather_into_tensor",
    "all_reduce",
    "barrier",
    "broadcast",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "is_initialized",
]


def is_initialized() -> bool:
    """Whether the ranks have met."""
    return dist.is_initialized() or threads.current() is not None


def get_rank(group: Any = None) -> int:
    """This rank's number, of `group` or of all ranks."""
    return dist.get_rank(group) if _by_torch(group) else _communicator().rank


def get_world_size(group: Any = None) -> int:
    """How many ranks there are, of `group` or at all."""
    return dist.get_world_size(group) if _by_torch(group) else _communicator().size


def get_local_rank() -> int:
    """This rank's number on its host, as the launcher says."""
    return int(os.environ.get("LOCAL_RANK", get_rank()))


def get_world_group() -> dist.ProcessGroup | None:
    """torch's group of all ranks; None where they met without one."""
    return dist.group.WORLD


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    """Return once every rank has called it."""
    if _by_torch(group):
        return dist.barrier(group, async_op, device_ids)
    return _communicator().barrier()


def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Replace `tensor` by what `op` makes of every rank's. Collective."""
    if _by_torch(group):
        return dist.all_reduce(tensor, op, group, async_op)
    work = _communicator().all_reduce(tensor, _name(op), async_op=async_op)
    return work if async_op else None


def broadcast(tensor: Tensor, src: int = 0, group: Any = None, async_op: bool = False) -> Any:
    """Give every rank the `tensor` of rank `src`. Collective."""
    if _by_torch(group):
        return dist.broadcast(tensor, src, group, async_op)
    work = _communicator().broadcast(tensor, src, async_op=async_op)
    return work if async_op else None


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Give every rank every rank's `input_tensor`, one after the other. Collective."""
    if _by_torch(group):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
    work = _communicator().all_gather(output_tensor, input_tensor, async_op=async_op)
    return work if async_op else None


def _by_torch(group: Any) -> bool:
    return group is not None or dist.is_initialized()


def _communicator() -> Communicator:
    return communication.init(quiet=True)


def _name(op: Any) -> Literal["sum", "mean", "max", "min"]:
    names: dict[Any, Literal["sum", "mean", "max", "min"]] = {
        ReduceOp.SUM: "sum",
        ReduceOp.AVG: "mean",
        ReduceOp.MAX: "max",
        ReduceOp.MIN: "min",
    }
    for known, name in names.items():
        if op == known:
            return name
    raise ValueError(f"{op} is not offered where ranks met without torch.distributed: call init_distributed() first")
