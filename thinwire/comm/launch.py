"""Joins the job that this process belongs to, whatever started it, with no change to the script.

``detect`` reads the environment; here the backend is chosen by the GPUs there are, torch.distributed or MPI is started,
and the ranks compare what they run.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import socket
import sys
import time
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire.comm import threads
from thinwire.comm.agreement import gather
from thinwire.comm.collectives import check_timeout
from thinwire.comm.communicator import Communicator
from thinwire.comm.launchers import Launch, check_alone, detect, meet
from thinwire.comm.torch_backend import TorchCommunicator, group_timeout
from thinwire.version import __version__

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
    # This module keeps the process group that there is when it is imported, and torch.optim imports it, through
    # torch._dynamo. The group would outlive Python, whose shutdown Gloo's threads then abort.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, about torch.jit
        importlib.import_module("torch.distributed.nn.functional")
    limit = group_timeout(timeout)
    if launch.launcher == "torchrun":
        dist.init_process_group(name, timeout=limit)
    else:
        store = meet(launch, launch.size, timeout, os.environ)
        dist.init_process_group(name, store=store, rank=launch.rank, world_size=launch.size, timeout=limit)
    # Without this, Gloo's threads can abort a process that is already over.
    atexit.register(_destroy_process_group)
    os.register_at_fork(after_in_child=_leave_to_parent)


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


def _destroy_process_group() -> None:
    gc.collect()  # cycles, as FSDP's hooks make them, may hold a group
    if dist.is_initialized():
        dist.destroy_process_group()
    # Gloo's threads give back the tensors of their last transfer under Python's lock. Let them have it: asking for it
    # once Python shuts down aborts the process.
    time.sleep(_GIVE_WAY_SECONDS)


def _leave_to_parent() -> None:
    """In a fork: keep alive what would wait, as it ends, for threads that only the parent has."""
    atexit.unregister(_destroy_process_group)
    for one in (dist.group.WORLD, dist.distributed_c10d._get_default_store()) if dist.is_initialized() else ():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def count_hosts(comm: Communicator, *, thinwire: str, torch: str) -> int:
    """On how many hosts the ranks are. Collective.

    `thinwire`, `torch`: this rank's versions. Where those of torch differ rank 0 warns. Raises RuntimeError, on every
    rank, where those of thinwire do: what they send each other may differ too.
    """
    mine = {"host": socket.gethostname(), "thinwire": thinwire, "torch": torch}
    everyones = gather(comm, mine, "join the job")
    first = everyones[0]
    for rank, other in enumerate(everyones):
        if other["thinwire"] != first["thinwire"]:
            raise RuntimeError(
                f"rank {rank} on {other['host']} runs thinwire {other['thinwire']}, rank 0 on {first['host']} "
                f"{first['thinwire']}: install the same version on every host"
            )
    of_another = next((rank for rank, other in enumerate(everyones) if other["torch"] != first["torch"]), None)
    if of_another is not None and comm.rank == 0:
        other = everyones[of_another]
        warnings.warn(
            f"rank {of_another} on {other['host']} runs torch {other['torch']}, rank 0 on {first['host']} "
            f"{first['torch']}: they may round differently, so that replicas of the weights drift apart",
            RuntimeWarning,
            stacklevel=3,
        )
    return len({one["host"] for one in everyones})


Backend = Literal["gloo", "nccl", "mpi"]


def init(backend: Backend | None = None, timeout: float | None = None, quiet: bool = False) -> Communicator:
    """Join the job and return the communicator of all its ranks. Collective; calling it again is fine.

    Recognised, in this order: a thread of ``threads.run``, an initialised torch.distributed, torchrun,
    mpirun (Open MPI, MPICH, Intel MPI, MVAPICH2), srun, a process on its own. ``backend`` None chooses MPI
    under mpirun when mpi4py and its MPI are there, else NCCL when every rank has a GPU, else Gloo. With NCCL or MPI
    the rank's GPU becomes the current one. ``timeout`` in seconds is for each collective of
    this communicator and of those that are made later without one, 300 unless ever given; in ``threads.run`` that of
    the run holds. Rank 0 says on stderr what was found, and optimizers what they save, unless ``quiet``.

    Raises ``ValueError`` for a backend that cannot work here, ``ImportError`` for MPI where there is none, and
    ``RuntimeError`` when the launcher's and the library's idea of the job differ, or ranks run different versions of
    thinwire.
    """
    if timeout is not None:
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
    if timeout is not None:
        Communicator.usual_timeout = timeout
    return join_job(backend, Communicator.usual_timeout, quiet)


def join_job(backend: Backend | None, timeout: float, quiet: bool) -> Communicator:
    """As `init`, of a process, with a timeout of this communicator alone."""
    launch = detect(os.environ)
    communicator = _join(launch, backend, timeout)
    hosts = count_hosts(communicator, thinwire=__version__, torch=torch.__version__)
    communicator.traffic.reset()
    communicator.speaks = communicator.rank == 0 and not quiet
    if communicator.speaks:
        _say_once(_found(launch, communicator, hosts))
    return communicator


def communicator_of(group: Any, timeout: float | None = None) -> Communicator:
    """Make the communicator of a group, as `Communicator.of`, which says what it takes and raises."""
    if isinstance(group, dist.ProcessGroup | DeviceMesh):
        return TorchCommunicator(group, timeout)
    if type(group).__module__.partition(".")[0] == "mpi4py":
        from thinwire.comm.mpi_backend import MPICommunicator

        return MPICommunicator(group, timeout)
    raise TypeError(
        f"a torch process group, a DeviceMesh of one dimension or a communicator of mpi4py was expected, got {group!r}"
    )


def join(comm: Communicator | None, mesh: DeviceMesh | None, backend: Backend | None = None) -> Communicator:
    """`comm`, the ranks of a mesh of one dimension, or if neither is given those that `init` finds over `backend`.
    Collective. Raises ValueError or TypeError for what is no such thing, or more than one."""
    if mesh is not None:
        if comm is not None or backend is not None:
            raise ValueError("give mesh=, comm= or comm_backend_name=, one of them: each says which ranks there are")
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a torch DeviceMesh of one dimension, got {mesh!r}")
        return communicator_of(mesh)
    if comm is not None and not isinstance(comm, Communicator):
        raise TypeError(f"comm must be a Communicator, which Communicator.of() makes of a group, got {comm!r}")
    return comm if comm is not None else init(backend)


def _join(launch: Launch, backend: Backend | None, timeout: float) -> Communicator:
    if dist.is_initialized() and backend != "mpi":
        if backend is None or backend in dist.get_backend_config():
            return TorchCommunicator(timeout=timeout)
        # A new group beside the job's, as another backend is asked for.
        return TorchCommunicator(dist.new_group(backend=backend, timeout=group_timeout(timeout)), timeout)
    if backend == "mpi" or (backend is None and launch.launcher == "mpirun" and _has_mpi()):
        return _join_mpi(launch, timeout)
    if launch.launcher == "single" and backend is None:
        check_alone(os.environ)
        return threads.single(timeout)
    init_process_group(launch, backend, timeout)
    return TorchCommunicator(timeout=timeout)


def _join_mpi(launch: Launch, timeout: float) -> Communicator:
    if launch.launcher == "torchrun":
        raise ValueError(
            "backend 'mpi' under torchrun: torchrun starts processes that MPI knows nothing of, so that each "
            "would be alone; start the script with mpirun, or leave the backend to init()"
        )
    from thinwire.comm.mpi_backend import MPICommunicator, install_abort_hook
    from thinwire.comm.mpi_rounds import MPI

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
        import thinwire.comm.mpi_rounds  # noqa: F401 - importing is the test: it loads the MPI library
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
