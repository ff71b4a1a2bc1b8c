"""The launcher that started this process, read from its environment alone, and the place where the ranks of a torch
process group find each other.

On one host they meet over loopback alone, on a free port that rank 0 tells the others through a file that only this
user can read; over several hosts where the environment says.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from thinwire.comm.torch_backend import group_timeout, serve_store

Launcher = Literal["torchrun", "mpirun", "srun", "single"]


@dataclass(frozen=True)
class Launch:
    """What the launcher told this process.

    ``launcher`` is "torchrun", "mpirun", "srun" or "single"; ``detail`` says which kind. ``size`` is None
    when only the MPI library itself can tell (PMIx without further variables). ``local_rank`` and
    ``local_size`` count the ranks of this host; None when the launcher does not say.
    """

    launcher: Launcher
    detail: str
    rank: int
    size: int | None
    local_rank: int | None
    local_size: int | None


@dataclass(frozen=True)
class _Names:
    """The variables in which a launcher gives each number, and what to call it."""

    detail: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_WORLD = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_MPI = (
    *(
        _Names(library, *(f"{prefix}_COMM_WORLD_{name}" for name in _WORLD))
        for library, prefix in (("Open MPI", "OMPI"), ("MVAPICH2", "MV2"))
    ),
    _Names("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
    _Names("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def detect(environ: Mapping[str, str]) -> Launch:
    """Recognise torchrun, mpirun, srun, or a process on its own, in this order, from ``environ``.

    Being inside an sbatch script or an salloc shell is being on one's own. Raises ``ValueError`` when the
    launcher's variables make no sense.
    """
    if all(name in environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        names = _Names("", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return _read("torchrun", names, environ)
    in_step = "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ
    for mpi in _MPI:
        if mpi.rank in environ and mpi.size in environ and not (in_step and _is_pmi_of_srun(mpi, environ)):
            return _read("mpirun", mpi, environ)
    if in_step:
        names = _Names("", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
        return replace(_read("srun", names, environ), local_size=_tasks_on_this_node(environ))
    if "PMIX_RANK" in environ and "PMIX_NAMESPACE" in environ:
        return Launch("mpirun", "PMIx", _integer(environ, "PMIX_RANK"), None, None, None)
    return Launch("single", "", 0, 1, 0, 1)


def check_alone(environ: Mapping[str, str]) -> None:
    """Raise ValueError for a process that no launcher has started, and which is told that there are others."""
    if "WORLD_SIZE" in environ and _integer(environ, "WORLD_SIZE") > 1:
        missing = " and ".join(name for name in ("RANK", "MASTER_ADDR") if name not in environ)
        raise ValueError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} says that there are other ranks, and {missing} is not set, so that "
            "each would train alone: start with torchrun, mpirun or srun, set it, or unset WORLD_SIZE"
        )


def rendezvous(environ: Mapping[str, str]) -> tuple[str, int]:
    """Address and port where the ranks of an srun step meet.

    MASTER_ADDR and MASTER_PORT where they are set; else the step's first host, and a port from the job's
    and the step's number, so that jobs on one host do not meet each other.
    """
    address = environ.get("MASTER_ADDR")
    if address is None:
        hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        if not hosts:
            raise ValueError("srun: neither MASTER_ADDR nor SLURM_STEP_NODELIST is set; set MASTER_ADDR")
        address = _first_host(hosts)
    if "MASTER_PORT" in environ:
        return address, _integer(environ, "MASTER_PORT")
    job = _integer(environ, "SLURM_JOB_ID")
    step = _integer(environ, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environ else 0
    return address, 20000 + (job * 7 + step) % 10000


def _read(launcher: Launcher, names: _Names, environ: Mapping[str, str]) -> Launch:
    rank, size = _integer(environ, names.rank), _integer(environ, names.size)
    if not 0 <= rank < size:
        raise ValueError(f"{launcher}: {names.rank}={rank} is not a rank of {names.size}={size}")
    local_rank = _integer(environ, names.local_rank) if names.local_rank in environ else None
    local_size = _integer(environ, names.local_size) if names.local_size in environ else None
    return Launch(launcher, names.detail, rank, size, local_rank, local_size)


def _is_pmi_of_srun(mpi: _Names, environ: Mapping[str, str]) -> bool:
    """Whether PMI_RANK comes from ``srun --mpi=pmi2`` and not from an mpirun that runs inside a step."""
    return (
        mpi.rank == "PMI_RANK"
        and mpi.local_rank not in environ
        and environ[mpi.rank] == environ["SLURM_PROCID"]
        and environ[mpi.size] == environ["SLURM_STEP_NUM_TASKS"]
    )


def _tasks_on_this_node(environ: Mapping[str, str]) -> int | None:
    """Read the number for this node in SLURM_STEP_TASKS_PER_NODE, which reads like ``4(x2),3``."""
    if "SLURM_STEP_TASKS_PER_NODE" not in environ or "SLURM_NODEID" not in environ:
        return None
    counts: list[int] = []
    for entry in environ["SLURM_STEP_TASKS_PER_NODE"].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = _integer(environ, "SLURM_NODEID")
    return counts[node] if node < len(counts) else None


def _first_host(hosts: str) -> str:
    """First name of a Slurm host list: ``node[003-005,9],gpu1`` gives ``node003``."""
    match = re.match(r"(?:[^,\[\]]|\[\d[^\]]*\])+", hosts)
    if match is None:
        raise ValueError(f"srun: cannot read the host list {hosts!r}; set MASTER_ADDR")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except KeyError:
        raise ValueError(f"{name} is not set") from None
    except ValueError:
        raise ValueError(f"{name} should be an integer, not {environ[name]!r}") from None


# Rendezvous

_LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.01
_ARRIVED = "thinwire/arrived"


def meet(launch: Launch, size: int, timeout: float, environ: Mapping[str, str]) -> Store:
    """The store through which the ranks find each other; rank 0 serves it. Collective.

    Raises ValueError if no meeting place is given, and RuntimeError where rank 0 does not come.
    """
    if size == 1:
        return HashStore()
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return _store(*rendezvous(environ), launch, size, timeout)
    if launch.local_size == size and "MASTER_ADDR" not in environ:
        if "MASTER_PORT" in environ:
            return _store(_LOOPBACK, int(environ["MASTER_PORT"]), launch, size, timeout)
        return _meet_on_this_host(launch, size, timeout, environ)
    if launch.launcher == "srun":
        return _store(*rendezvous(environ), launch, size, timeout)
    raise ValueError(
        "mpirun over several hosts does not tell torch where to meet: set MASTER_ADDR to rank 0's host and "
        "MASTER_PORT to a free port there, for example with mpirun -x MASTER_ADDR=host0 -x MASTER_PORT=29500"
    )


def _meet_on_this_host(launch: Launch, size: int, timeout: float, environ: Mapping[str, str]) -> Store:
    path = _private_folder() / hashlib.sha256(_job(launch, environ).encode()).hexdigest()[:32]
    if launch.rank != 0:
        store = _store(_LOOPBACK, _read_port(path, timeout), launch, size, timeout)
        store.add(_ARRIVED, 1)
        return store
    store = serve_store(_LOOPBACK, 0, group_timeout(timeout), size)
    _write_port(path, store.port)
    deadline = time.monotonic() + timeout
    try:
        while (came := store.add(_ARRIVED, 0)) < size - 1:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{came} of {size - 1} other ranks came within {timeout:g} s: did all of them start?"
                )
            time.sleep(_POLL_SECONDS)
    finally:
        path.unlink(missing_ok=True)
    return store


def _job(launch: Launch, environ: Mapping[str, str]) -> str:
    """A name that the ranks of one job on this host share, and no other job here."""
    if "PMIX_NAMESPACE" in environ:
        return f"pmix {environ['PMIX_NAMESPACE']}"
    if launch.launcher == "srun":
        return f"slurm {environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    return f"parent {os.getppid()}"


def _store(address: str, port: int, launch: Launch, size: int, timeout: float) -> Store:
    """Rank 0's at this address; where that is loopback, no other host can reach it."""
    if launch.rank == 0 and _is_loopback(address):
        return serve_store(_LOOPBACK, port, group_timeout(timeout), size)
    return TCPStore(address, port, size, launch.rank == 0, group_timeout(timeout), wait_for_workers=False)


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.IPv4Address(address).is_loopback
    except ValueError:
        return False


def _private_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"thinwire-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ValueError(
            f"{folder} must be a folder that this user alone can use, for ranks to meet: remove it, or set MASTER_ADDR "
            "and MASTER_PORT"
        )
    return folder


def _write_port(path: Path, port: int) -> None:
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(file, "w") as opened:
        opened.write(f"{port} {os.getpid()}")
    new.replace(path)  # whole or absent


def _read_port(path: Path, timeout: float) -> int:
    deadline = time.monotonic() + timeout
    while True:
        try:
            port, process = map(int, path.read_text().split())
            os.kill(process, 0)  # does it live? A job that was killed may have left its file behind
            return port
        except (FileNotFoundError, ProcessLookupError):
            pass
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"rank 0 did not say in {path} within {timeout:g} s where to meet: did it start, and do all ranks "
                "share this folder? If not, set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port"
            )
        time.sleep(_POLL_SECONDS)
