"""deepspeed.init_distributed: how the ranks of a script meet."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire import comm as communication
from thinwire.comm import threads
from thinwire.deepspeed.usage_error import DeepSpeedUsageError

__all__ = ["init_distributed"]

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
        communication.init(backend, timeout=limit.total_seconds(), quiet=not verbose)  # type: ignore[arg-type]
