"""deepspeed.comm's calls that also serve ranks which met without torch.distributed, over MPI or as threads: by
torch.distributed if it is initialised, else by the communicator that thinwire finds."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from thinwire import comm as communication
from thinwire.comm import Communicator, LoggedCommunicator, threads
from thinwire.comm.launch import join_job
from thinwire.deepspeed.errors import DeepSpeedUsageError

_counted = threading.local()  # of each rank, where ranks are threads
_HALF_AN_HOUR = timedelta(minutes=30)
_BACKENDS = {"ccl": "gloo", "hccl": "gloo"}
"""Those of DeepSpeed's for devices that thinwire moves bytes to by another."""


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """`deepspeed.init_distributed`: have the ranks meet, and torch.distributed initialised. Collective.

    Whatever launched the processes is recognised, MPI too, so that `auto_mpi_discovery`, `distributed_port` and
    `config` are not needed; `init_method`, `rank` and `world_size` go to torch. A second call does nothing.

    Raises DeepSpeedUsageError for `dist_init_required` False where nothing is initialised.
    """
    if dist.is_initialized() or threads.current() is not None:
        return
    if dist_init_required is False:
        raise DeepSpeedUsageError(
            "dist_init_required is False, and torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() before, or leave dist_init_required out"
        )
    limit = _HALF_AN_HOUR if timeout is None else timeout
    backend = _BACKENDS.get(dist_backend or "", dist_backend) or ("nccl" if torch.cuda.is_available() else "gloo")
    if init_method is not None:
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=limit)
    else:
        join_job(backend, limit.total_seconds(), quiet=not verbose)  # type: ignore[arg-type]
    if timeout is not None:
        Communicator.usual_timeout = timeout.total_seconds()


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


def get_model_parallel_rank() -> int:
    """Return 0: models are not split."""
    return 0


def get_model_parallel_world_size() -> int:
    """Return 1: models are not split."""
    return 1


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


def note_logged(comm: Communicator) -> None:
    """Have `log_summary` tell of what is counted on these ranks, an engine's."""
    _counted.comm = weakref.ref(comm) if isinstance(comm, LoggedCommunicator) else None


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print, on rank 0, the collectives of the engine that was made last: all that "comms_logger" counts. Collective.

    Times have the wait for late ranks in them, so that `show_straggler` changes nothing. `return_dict`: return them
    too. Without "comms_logger" there is a warning, on rank 0, and no summary.
    """
    found: weakref.ref[LoggedCommunicator] | None = getattr(_counted, "comm", None)
    comm = None if found is None else found()
    if comm is not None:
        return comm.log_summary(return_dict)
    if get_rank() == 0:
        warnings.warn(
            'log_summary() has nothing to tell: give the configuration "comms_logger": {"enabled": true}',
            RuntimeWarning,
            stacklevel=2,
        )
    return None


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
