from __future__ import annotations

import secrets

import pytest
import torch
import torch.distributed as dist

from tests.comm.collectives_body import CHECKS
from tests.comm.job import FAILURE_TIMEOUT, JOB
from thinwire.comm import TorchCommunicator, init


@pytest.fixture
def _group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group_of_one")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_body_on_one_process(check):
    comm = TorchCommunicator()
    check(comm, secrets.randbits(31))
    comm.close()


@pytest.mark.usefixtures("_group_of_one")
def test_init_uses_the_initialised_group(capfd):
    comm = init(timeout=7.0)
    assert isinstance(comm, TorchCommunicator)
    assert (comm.backend, comm.timeout, comm.size) == ("gloo", 7.0, 1)
    assert "backend gloo" in capfd.readouterr().err


@pytest.mark.usefixtures("_group_of_one")
def test_a_given_group_is_used():
    comm = TorchCommunicator(dist.new_group([0]))
    comm.barrier()
    assert comm.size == 1


@pytest.mark.usefixtures("_group_of_one")
def test_host_tensors_need_a_backend_that_takes_them():
    comm = TorchCommunicator()
    comm._wiring.backend_of = {"cuda": "nccl"}
    with pytest.raises(ValueError, match=r"tensors on cpu cannot travel .*init\(backend='gloo'\)"):
        comm.all_reduce(torch.ones(2))
    with pytest.raises(ValueError, match="tensors on cpu cannot travel"):
        comm.broadcast(torch.ones(2))


def test_torch_distributed_must_be_initialised():
    with pytest.raises(RuntimeError, match="not initialised"):
        TorchCommunicator()


@pytest.mark.launch
def test_body_under_torchrun(jobs):
    done = jobs.torchrun(3, *JOB, "body", str(secrets.randbits(31)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 3 passed over gloo" for rank in range(3)]
    assert "thinwire: 3 ranks on 1 host, backend gloo, started by torchrun\n" in done.stderr


@pytest.mark.launch
def test_large_messages_go_to_one_partner_at_a_time(jobs):
    done = jobs.torchrun(3, *JOB, "turns")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} took turns" for rank in range(3)]


@pytest.mark.launch
@pytest.mark.parametrize(
    ("how", "victim", "chunk"), [("killed", 1, 3), ("killed", 0, 100_003), ("stopped", 0, 100_003)]
)
def test_a_lost_rank_is_named(jobs, how, victim, chunk):
    for survivor in jobs.orphans(3, *JOB, "lose", how, str(chunk), str(victim), victim=victim):
        assert survivor.returncode != 0
        lines = survivor.stdout.splitlines()
        error = next(line for line in lines if "thinwire.comm.errors.Communication" in line)
        assert f"all_to_all of {3 * chunk} float32" in error
        assert f"rank {victim} did not answer" in error
        assert ("CommunicationTimeout" in error) == (how == "stopped")
        assert (f"timed out after {FAILURE_TIMEOUT:g} s" in error) == (how == "stopped")


@pytest.mark.launch
def test_a_rank_at_another_call_is_named(jobs):
    for survivor in jobs.orphans(3, *JOB, "lose", "elsewhere", "3", "1", victim=1):
        assert survivor.returncode != 0
        assert "rank 1 is at all_gather of 5 float32" in survivor.stdout
