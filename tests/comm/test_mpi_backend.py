from __future__ import annotations

import secrets

import pytest

from tests.comm.launching import run_alone, run_mpirun

pytestmark = pytest.mark.launch


def test_body_under_mpirun():
    done = run_mpirun(3, "mpi_body", str(secrets.randbits(31)))
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [f"rank {rank} of 3 passed over {what}" for rank in range(3) for what in ("mpi", "its own")]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
    assert "thinwire: 3 ranks on 1 host, backend mpi, started by mpirun (Open MPI)\n" in done.stderr


def test_body_without_mpirun():
    pytest.importorskip("mpi4py")
    done = run_alone("body", str(secrets.randbits(31)), "mpi")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "rank 0 of 1 passed over mpi\n"


def test_a_raising_rank_ends_the_job():
    done = run_mpirun(3, "lose", "raising", "1")
    assert done.returncode != 0
    assert "KeyError: 'a bug of the user'" in done.stderr


def test_a_stopped_rank_is_named():
    done = run_mpirun(3, "lose", "stopped", "1")
    assert done.returncode != 0
    assert "all_to_all of 9 float32" in done.stderr
    assert "rank 1 did not answer" in done.stderr
