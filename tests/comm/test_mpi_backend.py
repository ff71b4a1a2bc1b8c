from __future__ import annotations

import secrets

import pytest

from tests.comm.job import JOB
from tests.launching import need_mpi

pytestmark = pytest.mark.launch


@pytest.mark.parametrize(
    ("ranks", "task", "said"),
    [
        (2, "overlap", ["rank {rank} computed meanwhile"]),  # transfers end while nothing calls MPI
        (3, "rounds", ["rank {rank} went round"]),  # large messages go to one partner at a time
        (2, "end_threads", ["1 at the end", "ended", "ended"]),  # with the communicator, and with the process
        (3, "mpi_body", ["rank {rank} of 3 passed over mpi", "rank {rank} of 3 passed over its own"]),
    ],
)
def test_under_mpirun(jobs, ranks, task, said):
    seed = [str(secrets.randbits(31))] if task == "mpi_body" else []
    done = jobs.mpirun(ranks, *JOB, task, *seed)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [line.format(rank=rank) for rank in range(ranks) for line in said]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
    if task == "mpi_body":
        assert "thinwire: 3 ranks on 1 host, backend mpi, started by mpirun (Open MPI)\n" in done.stderr


def test_body_without_mpirun(jobs):
    need_mpi()
    done = jobs.alone(*JOB, "body", str(secrets.randbits(31)), "mpi")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "rank 0 of 1 passed over mpi\n"


def test_a_raising_rank_ends_the_job(jobs):
    done = jobs.mpirun(3, *JOB, "lose", "raising", "3", "1")
    assert done.returncode != 0
    assert "KeyError: 'a bug of the user'" in done.stderr


def test_a_stopped_rank_is_named(jobs):
    done = jobs.mpirun(3, *JOB, "lose", "stopped", "100003", "1")
    assert done.returncode != 0
    assert "all_to_all of 300009 float32" in done.stderr
    assert "rank 1 did not answer" in done.stderr


def test_a_rank_at_another_call_is_named(jobs):
    done = jobs.mpirun(3, *JOB, "lose", "elsewhere", "100003", "1")
    assert done.returncode != 0
    assert "ranks are not at the same call" in done.stderr
    assert "rank 1 is at all_gather of 5 float32" in done.stderr or "is at all_to_all of 300009" in done.stderr


def test_who_never_joins_what_the_thread_drives_is_named(jobs):
    done = jobs.mpirun(2, *JOB, "stall")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "all_to_all of 1048576 float32 (call 3) timed out after 2 s on rank 0 of 2: rank 1 did not answer"
        in done.stdout
    )


def test_an_mpi_for_one_thread_is_used_by_one_and_says_so(jobs):
    need_mpi()
    done = jobs.alone(*JOB, "one_thread", "serialized")
    assert done.returncode == 0, done.stdout + done.stderr
    warning, error = done.stdout.splitlines()
    assert "move only while MPI is called" in warning
    assert "do not ask for progress" in error


def test_the_thread_can_be_switched_off(jobs):
    need_mpi()
    done = jobs.alone(*JOB, "switched_off", THINWIRE_MPI_PROGRESS="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "0 threads\n"
