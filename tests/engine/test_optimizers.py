"""Where optimizer state lies at stage 3, and a backend named for a 1-bit optimizer: what carries the bytes changes no
result, so that files made for NCCL or MPI train wherever the job runs."""

from __future__ import annotations

import pytest
import torch

from tests.engine.tiny import make_engine, settings, train
from thinwire.comm import threads
from thinwire.engine.config import load_config
from thinwire.engine.config.models import OffloadConfig, ZeroConfig
from thinwire.engine.optimizers import _stepped_on, communicator_of

NONE, CPU = OffloadConfig(), OffloadConfig(device="cpu")


@pytest.mark.parametrize(
    ("state", "shards", "expected"), [(NONE, NONE, None), (CPU, CPU, None), (CPU, NONE, "cpu"), (NONE, CPU, "cuda:0")]
)
def test_state_lies_apart_where_one_of_the_two_is_offloaded(
    state: OffloadConfig, shards: OffloadConfig, expected: str | None
) -> None:
    zero = ZeroConfig(stage=3, offload_optimizer=state, offload_param=shards)
    found = _stepped_on(zero, torch.device("cuda", 0))
    assert found == (None if expected is None else torch.device(expected))
    assert _stepped_on(zero, torch.device("cpu")) is None


@pytest.mark.parametrize("backend", ["nccl", "mpi", "gloo", "compressed", "hccl"])
def test_every_kind_trains_on_threads_as_none_does(backend) -> None:
    def losses(**params):
        optimizer = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2, **params}}

        def body(comm):
            return train(make_engine(comm, settings(0, optimizer=optimizer)), range(4))

        return threads.run(body, 2)

    assert losses(comm_backend_name=backend) == losses()


@pytest.mark.parametrize(("backend", "lack"), [("nccl", "not on a GPU"), ("mpi", "not started by mpirun or srun")])
def test_a_backend_that_the_job_lacks_gives_way_and_rank_0_says_so(backend, lack, capsys, monkeypatch) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    comm = threads.single(60)
    comm.speaks = True
    assert communicator_of(backend, comm, torch.device("cpu")) is comm
    told = capsys.readouterr().err
    assert f'"optimizer.params.comm_backend_name" is "{backend}", and ' in told
    assert lack in told


def test_a_kind_that_means_the_jobs_own_communicator_is_listed() -> None:
    config = load_config(settings(0, optimizer={"type": "OneBitAdam", "params": {"comm_backend_name": "hccl"}}), 2)
    assert list(config.remarks.without_effect) == ["optimizer.params.comm_backend_name"]
