"""Starts jobs as real processes, as users do: a program alone, under torchrun, under mpirun, or rank by rank."""

import inspect
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.warm_python import TAKEN_APART
from thinwire.comm import Communicator, threads

REPOSITORY = Path(__file__).parents[1]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")
# Only what hangs should end here, just before the test's own limit would take the output along.
LIMIT_SECONDS = 280

since_torch_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="needs torch 2.13")
"""Packets between stages; what `full_tensor` makes of a fused matrix."""

WHOLLY = {TAKEN_APART: "1"}
"""For programs whose last breath is of interest too: they end as in a fresh interpreter."""

Done = subprocess.CompletedProcess[str]


def environment(**extra: str) -> dict[str, str]:
    """Environment without a trace of a launcher, in which the package is found and MPI runs as root."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    clean |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    # Where colorama is installed, numba ends a rank that has a terminal, as mpirun gives it, with an escape sequence.
    clean |= {"NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1"}
    clean |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return clean | extra


def run(command: list[str], **extra: str) -> Done:
    return subprocess.run(command, env=environment(**extra), capture_output=True, text=True, timeout=LIMIT_SECONDS)


@cache
def _why_no_mpi() -> str | None:
    """What mpi4py says where it cannot be used; in a process of its own, as importing it starts MPI."""
    code = "try: import mpi4py.MPI\nexcept (ImportError, RuntimeError) as error: print(error)"
    return run([sys.executable, "-c", code]).stdout.strip() or None


def need_mpi() -> None:
    """Skip the test where mpi4py is missing, or finds no MPI library."""
    lack = _why_no_mpi()
    if lack is not None:
        pytest.skip(f"no MPI: {lack}")


def find_mpirun() -> str:
    """Open MPI's launcher, beside the interpreter or on the path; without it or mpi4py, the test is skipped."""
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("no mpirun on this machine")
    need_mpi()
    return mpirun


def on_threads(size: int | str) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Run a test, which takes the communicator first, on each of ``size`` ranks that are threads, or of as many as its
    parameter of that name says."""

    def decorate(body: Callable[..., object]) -> Callable[..., None]:
        @wraps(body)
        def test(**given: Any) -> None:
            threads.run(lambda comm: body(comm, **given), given[size] if isinstance(size, str) else size)

        signature = inspect.signature(body)
        test.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
        return test

    return decorate


@contextmanager
def one_core() -> Iterator[None]:
    """The core that this thread is on, for it and the threads that it starts: ranks hand the interpreter to each other
    at every collective."""
    stat = Path("/proc/thread-self/stat")
    if not hasattr(os, "sched_setaffinity") or not stat.exists():
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {int(stat.read_text().rpartition(")")[2].split()[36])})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def same_on_all_ranks(comm: Communicator, values: Tensor) -> bool:
    """To the bit."""
    return len(set(comm.all_gather_bytes(values.contiguous().view(torch.uint8).numpy().tobytes()))) == 1


def free_port() -> int:
    """Of this host, for what is started next."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Jobs:
    """Jobs whose ranks, and whose torchrun, are programs of one interpreter: ``-m module argument...`` or a script."""

    def __init__(self, python: str) -> None:
        self.python = python

    def alone(self, *program: str, **extra: str) -> Done:
        return run([self.python, *program], **extra)

    def torchrun(self, size: int, *program: str, **extra: str) -> Done:
        launcher = [self.python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        return run([*launcher, *program], **extra)

    def mpirun(self, size: int, *program: str, **extra: str) -> Done:
        """Programs end wholly, and MPI with them: to mpirun, one that does not has failed."""
        command = [find_mpirun(), "--map-by", ":OVERSUBSCRIBE", "-n", str(size), self.python, *program]
        return run(command, **WHOLLY, **extra)

    def orphans(self, size: int, *program: str, victim: int, **extra: str) -> list[Done]:
        """Ranks as torchrun starts them, but with nobody who looks after them; the results of all but the victim."""
        job = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        processes = [
            subprocess.Popen(
                [self.python, *program],
                env=environment(RANK=str(rank), **job, **extra),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            survivors = [process for rank, process in enumerate(processes) if rank != victim]
            outputs = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in survivors]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        return [
            subprocess.CompletedProcess(process.args, process.returncode, output)
            for process, output in zip(survivors, outputs, strict=True)
        ]
