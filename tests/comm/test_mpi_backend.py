from __future__ import annotations

import secrets

import pytest

from tests.comm.job import JOB
from tests.launching import need_mpi

pytestmark = pytest.mark.launch


def test_body_under_mpirun(jobs):
    done = jobs.mpirun(3, *JOB, "mpi_body", str(secrets.randbits(31)))
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [f"rank {rank} of 3 passed over {what}" for rank in range(3) for what in ("mpi", "its own")]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
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


def test_transfers_end_while_nobody_calls_mpi(jobs):
    done = jobs.mpirun(2, *JOB, "overlap")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} computed meanwhile" for rank in range(2)]


def test_large_messages_go_to_one_partner_at_a_time(jobs):
    done = jobs.mpirun(3, *JOB, "rounds")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} went round" for rank in range(3)]


def test_who_never_joins_what_the_thread_drives_is_named(jobs):
    done = jobs.mpirun(2, *JOB, "stall")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "all_to_all of 1048576 float32 (call 3) timed out after 2 s on rank 0 of 2: rank 1 did not answer"
        in done.stdout
    )


def test_the_thread_ends_with_the_communicator_and_with_the_process(jobs):
    done = jobs.mpirun(2, *JOB, "end_threads")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == 2 * ["1 at the end"] + 4 * ["ended"]


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
