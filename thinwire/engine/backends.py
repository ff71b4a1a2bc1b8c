"""Which communicator a 1-bit optimizer sends over, where the configuration names a library for it."""

from __future__ import annotations

import os
import sys
from typing import Literal

import torch

from thinwire import comm as communication
from thinwire.comm import Communicator, LoggedCommunicator
from thinwire.comm.launchers import detect

__all__ = ["communicator_of"]

Named = Literal["gloo", "nccl", "mpi"]


def communicator_of(backend: Named | None, comm: Communicator, device: torch.device) -> Communicator:
    """The ranks of `comm` over `backend`; `comm` itself where this job cannot use that, which rank 0 says.

    What carries the bytes changes no result: files made for clusters with NCCL or MPI train elsewhere as they are.

    Raises ValueError where the backend would join other ranks.
    """
    if backend is None or backend == comm.backend:
        return comm
    if (lack := _lack(backend, comm, device)) is not None:
        if comm.speaks:
            print(
                f'thinwire: "optimizer.params.comm_backend_name" is "{backend}", and {lack}: compressed momentum '
                f"travels over the job's own {comm.backend}",
                file=sys.stderr,
                flush=True,
            )
        return comm
    joined = communication.init(backend, comm.timeout, quiet=True)
    if (joined.rank, joined.size) != (comm.rank, comm.size):
        raise ValueError(
            f'"optimizer.params.comm_backend_name" "{backend}" joins all {joined.size} ranks of the job, and the '
            f"engine's communicator has {comm.size}: leave it out"
        )
    return LoggedCommunicator(joined, comm.log) if isinstance(comm, LoggedCommunicator) else joined


def _lack(backend: Named, comm: Communicator, device: torch.device) -> str | None:
    """Why this job cannot use the backend; None where it can."""
    if comm.backend == "threads":
        return "ranks are threads of one process"
    if backend == "nccl" and device.type != "cuda":
        return "the model is not on a GPU"
    launcher = detect(os.environ).launcher
    if backend == "mpi" and launcher in ("torchrun", "single"):
        return "the job was not started by mpirun or srun"
    return None
