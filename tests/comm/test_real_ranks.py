"""Communicators over Gloo and MPI between real processes, and over a process group of one: the body that every backend
must pass, who is named where a rank fails, and MPI's thread."""

import secrets

import pytest
import torch
import torch.distributed as dist

from tests.comm.collectives_body import CHECKS
from tests.comm.job import FAILURE_TIMEOUT, JOB
from tests.launching import WHOLLY, Done, Jobs, need_mpi
from tests.refusing import refused
from thinwire.comm import TorchCommunicator


def seed() -> str:
    return str(secrets.randbits(31))


def succeed(done: Done) -> list[str]:
    """The lines that all ranks have printed."""
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


@pytest.fixture
def _group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group_of_one")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_body_on_one_process(check) -> None:
    comm = TorchCommunicator(dist.new_group([0]))
    check(comm, int(seed()))
    comm.close()


@pytest.mark.usefixtures("_group_of_one")
def test_host_tensors_need_a_backend_that_takes_them() -> None:
    comm = TorchCommunicator()
    comm._wiring.backend_of = {"cuda": "nccl"}
    for collective in (comm.all_reduce, comm.broadcast):
        refused(ValueError, r"tensors on cpu cannot travel .*init\(backend='gloo'\)", collective, torch.ones(2))


def test_torch_distributed_must_be_initialised() -> None:
    refused(RuntimeError, "not initialised", TorchCommunicator)


@pytest.mark.launch
def test_under_torchrun(jobs: Jobs) -> None:
    done = jobs.torchrun(3, *JOB, "over_gloo", seed(), **WHOLLY)
    assert succeed(done) == [f"rank {rank} of 3 passed over gloo" for rank in range(3)]
    assert "thinwire: 3 ranks on 1 host, backend gloo, started by torchrun\n" in done.stderr


@pytest.mark.launch
@pytest.mark.parametrize(
    ("how", "victim", "chunk"),
    [
        ("killed", 1, 3),
        ("killed", 0, 100_003),
        pytest.param("stopped", 0, 100_003, marks=pytest.mark.programs),
        ("elsewhere", 1, 3),
    ],
)
def test_a_lost_rank_is_named(jobs: Jobs, how: str, victim: int, chunk: int) -> None:
    for survivor in jobs.orphans(3, *JOB, "lose", how, str(chunk), str(victim), victim=victim):
        assert survivor.returncode != 0
        if how == "elsewhere":
            assert "rank 1 is at all_gather of 5 float32" in survivor.stdout
            continue
        error = next(line for line in survivor.stdout.splitlines() if "thinwire.comm.errors.Communication" in line)
        assert f"all_to_all of {3 * chunk} float32" in error
        assert f"rank {victim} did not answer" in error
        assert ("CommunicationTimeout" in error) == (how == "stopped")
        assert (f"timed out after {FAILURE_TIMEOUT:g} s" in error) == (how == "stopped")


@pytest.mark.programs
def test_under_mpirun(jobs: Jobs) -> None:
    done = jobs.mpirun(3, *JOB, "over_mpi", seed())
    stalled, *passed = succeed(done)
    assert passed == [f"rank {rank} of 3 passed over mpi" for rank in range(3)]
    assert "all_to_all of 3145728 float32" in stalled
    assert "timed out after 2 s on rank 0 of 3: ranks 1, 2 did not answer" in stalled
    assert "thinwire: 3 ranks on 1 host, backend mpi, started by mpirun (Open MPI)\n" in done.stderr


@pytest.mark.launch
def test_mpis_thread_ends_with_the_communicator_and_with_the_process(jobs: Jobs) -> None:
    assert succeed(jobs.mpirun(2, *JOB, "end_threads")) == ["1 at the end"] * 2 + ["ended"] * 4


@pytest.mark.launch
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raising", ["KeyError: 'a bug of the user'"]),
        pytest.param("stopped", ["all_to_all of 300009 float32", "rank 1 did not answer"], marks=pytest.mark.programs),
        ("elsewhere", ["ranks are not at the same call"]),
    ],
)
def test_a_rank_that_fails_ends_the_job_of_mpirun(jobs: Jobs, how: str, said: list[str]) -> None:
    done = jobs.mpirun(3, *JOB, "lose", how, "100003", "1")
    assert done.returncode != 0
    assert all(one in done.stderr for one in said)
    if how == "elsewhere":
        assert "rank 1 is at all_gather of 5 float32" in done.stderr or "is at all_to_all of 300009" in done.stderr


@pytest.mark.launch
def test_mpi_without_mpirun(jobs: Jobs) -> None:
    need_mpi()
    assert succeed(jobs.alone(*JOB, "body", seed(), "mpi")) == ["rank 0 of 1 passed over mpi"]


@pytest.mark.launch
def test_an_mpi_for_one_thread_is_used_by_one_and_says_so(jobs: Jobs) -> None:
    need_mpi()
    warning, error = succeed(jobs.alone(*JOB, "one_thread", "serialized"))
    assert "move only while MPI is called" in warning
    assert "do not ask for progress" in error
