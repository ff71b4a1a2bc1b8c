"""Starts torch.distributed under launchers that it does not know itself: srun, mpirun, or none.

Chooses the backend by the GPUs there are, and finds a place where the ranks can meet.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import time
import warnings
from collections.abc import Mapping
from typing import Literal

import torch
import torch.distributed as dist

from thinwire.comm.launchers import Launch
from thinwire.comm.meeting import meet
from thinwire.comm.torch_backend import group_timeout

__all__ = ["choose_backend", "init_process_group"]

_GIVE_WAY_SECONDS = 0.05

_MIXED = "cpu:gloo,cuda:nccl"
"""Chosen where every rank has a GPU of its own: host tensors can travel as well."""


def init_process_group(launch: Launch, backend: Literal["gloo", "nccl", "mpi"] | None, timeout: float) -> None:
    """Initialise torch's default process group for ``launch``; it is destroyed when Python exits.

    Raises ``ValueError`` when NCCL is asked for but GPUs are missing, or when the ranks cannot meet.
    """
    if launch.size is None:
        raise ValueError("the launcher does not say how many ranks there are; install mpi4py, which can ask")
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    name = choose_backend(launch, backend, gpus, os.environ)
    if "nccl" in name:
        torch.cuda.set_device((launch.local_rank or 0) % gpus)
    _import_what_would_keep_the_group()
    limit = group_timeout(timeout)
    if launch.launcher == "torchrun":
        dist.init_process_group(name, timeout=limit)
    else:
        store = meet(launch, launch.size, timeout, os.environ)
        dist.init_process_group(name, store=store, rank=launch.rank, world_size=launch.size, timeout=limit)
    # Without this, Gloo's threads can abort a process that is already over.
    atexit.register(_destroy_process_group)


def choose_backend(launch: Launch, backend: str | None, gpus: int, environ: Mapping[str, str]) -> str:
    """Name for ``init_process_group``: ``backend``, or the best one for a host where this rank sees ``gpus``.

    NCCL needs a GPU a rank. Slurm may show each rank only its own.
    """
    own_gpu = gpus == 1 and "SLURM_GPUS_PER_TASK" in environ
    ranks_here = launch.local_size or launch.size or 1
    enough = gpus >= ranks_here or own_gpu
    if backend is None:
        return _MIXED if enough else "gloo"
    if backend == "nccl" and not enough:
        raise ValueError(
            f"backend 'nccl' needs a GPU for each rank: {ranks_here} ranks on this host see {gpus}; start "
            "fewer ranks, or use backend='gloo'"
        )
    return backend


def _import_what_would_keep_the_group() -> None:
    # This module keeps the process group that there is when it is imported, and torch.optim imports it, through
    # torch._dynamo. The group would outlive Python, whose shutdown Gloo's threads then abort.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, about torch.jit
        importlib.import_module("torch.distributed.nn.functional")


def _destroy_process_group() -> None:
    gc.collect()  # cycles, as FSDP's hooks make them, may hold a group
    if dist.is_initialized():
        dist.destroy_process_group()
    # Gloo's threads give back the tensors of their last transfer under Python's lock. Let them have it: asking for it
    # once Python shuts down aborts the process.
    time.sleep(_GIVE_WAY_SECONDS)
