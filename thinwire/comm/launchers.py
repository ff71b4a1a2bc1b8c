"""Which launcher started this process, as this rank of how many: read from its environment alone.

A pure function, so that every launcher can be tested without having it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["Launch", "detect", "rendezvous"]

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


_MPI = (
    _Names(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Names(
        "MVAPICH2",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
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
