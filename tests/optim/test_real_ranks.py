"""The same bodies on threads, with 4 ranks, and, shorter, on real processes, with 1 and 3 over Gloo under torchrun,
with 1 and 2 over Open MPI under mpirun."""

from __future__ import annotations

import pytest

from tests.compress import bodies
from thinwire.comm import threads

PROGRAM = ("-m", "tests.optim.rank_program")


@pytest.mark.parametrize("body", bodies.ALL, ids=lambda body: getattr(body, "__name__", str(body)))
def test_on_threads(body) -> None:
    threads.run(body, 4)


@pytest.mark.launch
def test_on_gloo_and_beside_ddp(jobs) -> None:
    done = jobs.torchrun(3, *PROGRAM, "ddp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all held on gloo with up to 3 ranks" in done.stdout


@pytest.mark.launch
def test_on_mpi(jobs) -> None:
    done = jobs.mpirun(2, *PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all held on mpi with up to 2 ranks" in done.stdout
