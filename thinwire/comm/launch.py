"""Joins the job that this process belongs to, whatever started it, with no change to the script.

``detect`` reads the environment; here the backend is chosen and the ranks meet.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Literal, get_args

import torch
import torch.distributed as dist

from thinwire.comm import threads
from thinwire.comm.checks import check_timeout
from thinwire.comm.communicator import Communicator
from thinwire.comm.launchers import Launch, detect
from thinwire.comm.roster import count_hosts
from thinwire.comm.torch_backend import TorchCommunicator, group_timeout
from thinwire.comm.torch_launch import init_process_group
from thinwire.version import __version__

__all__ = ["Backend", "init"]

Backend = Literal["gloo", "nccl", "mpi"]


def init(backend: Backend | None = None, timeout: float = 300.0, quiet: bool = False) -> Communicator:
    """Join the job and return the communicator of all its ranks. Collective; calling it again is fine.

    Recognised, in this order: a thread of ``threads.run``, an initialised torch.distributed, torchrun,
    mpirun (Open MPI, MPICH, Intel MPI, MVAPICH2), srun, a process on its own. ``backend`` None chooses MPI
    under mpirun when mpi4py and its MPI are there, else NCCL when every rank has a GPU, else Gloo. With NCCL or MPI
    the rank's GPU becomes the current one. ``timeout`` in seconds is for each collective; in
    ``threads.run`` that of the run holds. Rank 0 says on stderr what was found, and optimizers what they save,
    unless ``quiet``.

    Raises ``ValueError`` for a backend that cannot work here, ``ImportError`` for MPI where there is none, and
    ``RuntimeError`` when the launcher's and the library's idea of the job differ, or ranks run different versions of
    thinwire.
    """
    check_timeout(timeout)
    if backend is not None and backend not in get_args(Backend):
        raise ValueError(
            f"unknown backend {backend!r}, expected one of {', '.join(get_args(Backend))}; ranks in threads "
            "are started by thinwire.comm.threads.run"
        )
    thread = threads.current()
    if thread is not None:
        if backend is not None:
            raise ValueError(f"backend {backend!r} asked for inside threads.run, where ranks are threads")
        return thread
    launch = detect(os.environ)
    communicator = _join(launch, backend, timeout)
    hosts = count_hosts(communicator, thinwire=__version__, torch=torch.__version__)
    communicator.traffic.reset()
    communicator.speaks = communicator.rank == 0 and not quiet
    if communicator.speaks:
        _say_once(_found(launch, communicator, hosts))
    return communicator


def _join(launch: Launch, backend: Backend | None, timeout: float) -> Communicator:
    if dist.is_initialized() and backend != "mpi":
        return _wrap_initialised(backend, timeout)
    if backend == "mpi" or (backend is None and launch.launcher == "mpirun" and _has_mpi()):
        return _join_mpi(launch, timeout)
    if launch.launcher == "single" and backend is None:
        return threads.single(timeout)
    init_process_group(launch, backend, timeout)
    return TorchCommunicator(timeout=timeout)


def _wrap_initialised(backend: Backend | None, timeout: float) -> Communicator:
    """Use the job's process group, or a new one beside it if another backend is asked for."""
    if backend is None or backend in dist.get_backend_config():
        return TorchCommunicator(timeout=timeout)
    return TorchCommunicator(dist.new_group(backend=backend, timeout=group_timeout(timeout)), timeout)


def _join_mpi(launch: Launch, timeout: float) -> Communicator:
    if launch.launcher == "torchrun":
        raise ValueError(
            "backend 'mpi' under torchrun: torchrun starts processes that MPI knows nothing of, so that each "
            "would be alone; start the script with mpirun, or leave the backend to init()"
        )
    from thinwire.comm.mpi_backend import MPICommunicator, install_abort_hook
    from thinwire.comm.mpi_library import MPI

    world = MPI.COMM_WORLD.Get_size()
    if launch.size is not None and launch.size != world:
        raise RuntimeError(
            f"{launch.launcher} started {launch.size} ranks but mpi4py sees {world}: mpi4py uses another MPI "
            f"({MPI.Get_library_version().splitlines()[0].strip()}) than the launcher. Rebuild it against the "
            "launcher's (pip install --no-binary mpi4py --force-reinstall mpi4py, with its mpicc in PATH), start "
            "with the mpirun that belongs to mpi4py's MPI, or call init(backend='gloo')"
        )
    if launch.launcher == "mpirun":
        install_abort_hook()
    if torch.cuda.is_available() and launch.local_rank is not None:
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
    return MPICommunicator(timeout=timeout)


def _has_mpi() -> bool:
    try:
        import thinwire.comm.mpi_library  # noqa: F401 - importing is the test: it loads the MPI library
    except ImportError:
        return False
    return True


@cache
def _say_once(line: str) -> None:
    """A script and its optimizers each ask which job they are in."""
    print(line, file=sys.stderr, flush=True)


def _found(launch: Launch, communicator: Communicator, hosts: int) -> str:
    if launch.launcher == "single" and communicator.size == 1:
        started = "no launcher found; torchrun, mpirun or srun start more"
    elif launch.launcher == "single":
        started = "met in the torch.distributed that was initialised before"
    else:
        started = f"started by {launch.launcher}" + (f" ({launch.detail})" if launch.detail else "")
    ranks = f"{communicator.size} rank{'s' if communicator.size > 1 else ''}"
    where = f"{hosts} host{'s' if hosts > 1 else ''}"
    return f"thinwire: {ranks} on {where}, backend {communicator.backend}, {started}"
