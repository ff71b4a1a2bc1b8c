"""Starts the jobs of ``job.py`` as real processes: plain ranks, torchrun, mpirun."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
JOB = ("-m", "tests.comm.job")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")
LIMIT_SECONDS = 120


def environment(**extra: str) -> dict[str, str]:
    """Environment without a trace of a launcher, in which the package is found and MPI runs as root."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    clean |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    clean |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return clean | extra


def run(command: list[str], **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(**extra), capture_output=True, text=True, timeout=LIMIT_SECONDS)


def run_alone(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, *JOB, *arguments], **extra)


def run_torchrun(size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return run([*torchrun, *JOB, *arguments])


def run_mpirun(size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    beside_python = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside_python) if beside_python.exists() else shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun on this machine")
    pytest.importorskip("mpi4py")
    return run([mpirun, "--map-by", ":OVERSUBSCRIBE", "-n", str(size), sys.executable, *JOB, *arguments])


def run_ranks(size: int, *arguments: str, victim: int) -> list[subprocess.CompletedProcess[str]]:
    """Start ranks as torchrun does, but with nobody who looks after them; the results of the survivors."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for rank in range(size):
        place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, *JOB, *arguments, str(victim)]
        processes.append(
            subprocess.Popen(
                command, env=environment(**place), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
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
