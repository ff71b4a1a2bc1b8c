"""The same bodies on threads, with 2 and 4 ranks, and on real processes, with 1 and 3: Gloo under torchrun, Open MPI
under mpirun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compress import bodies
from thinwire.comm import threads

PROGRAM = ["-m", "tests.optim.rank_program"]


def run(command: list[str], **extra: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | extra
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("body", bodies.ALL, ids=lambda body: body.__name__)
def test_on_threads(body, size) -> None:
    threads.run(body, size)


@pytest.mark.launch
def test_on_gloo_and_beside_ddp() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    assert "all held on gloo with up to 3 ranks" in run([*launcher, *PROGRAM, "ddp"])


@pytest.mark.launch
def test_on_mpi() -> None:
    pytest.importorskip("mpi4py")
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("no mpirun")
    output = run(
        [mpirun, "-n", "3", "--map-by", ":OVERSUBSCRIBE", sys.executable, *PROGRAM],
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )
    assert "all held on mpi with up to 3 ranks" in output
