"""Starts programs with Open MPI's mpirun, as a user would, and never waits longer than it was told to."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Finished", "clean_environment", "find_mpirun", "run_limited"]

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "PRTE_", "SLURM_", "TORCHELASTIC_")


@dataclass(frozen=True)
class Finished:
    """A job that has ended.

    Attributes:
        code: its exit code; None where it was killed because its time was over.
        output: what it printed, errors included.
    """

    code: int | None
    output: str


def find_mpirun() -> str | None:
    """The mpirun beside this Python, else the one in PATH."""
    beside_python = Path(sys.executable).with_name("mpirun")
    return str(beside_python) if beside_python.exists() else shutil.which("mpirun")


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process, without traces of a launcher, with one thread a rank, and `extra`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_VARIABLES)}
    # torch warns that emulated hosts have no names in any DNS.
    calm = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**clean, **calm, **threads, **as_root, **extra}


def run_limited(command: Sequence[str], environment: Mapping[str, str], seconds: float, folder: Path) -> Finished:
    """Runs a command in `folder` for at most `seconds`; then it and its process group are killed.

    What it started elsewhere may outlive it and go on writing: that is not waited for.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            try:
                code = process.wait(seconds)
            finally:
                _kill(process)
        output.seek(0)
        return Finished(code, output.read())


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
