"""What one of four launched ranks does on a part of the job, ``mesh_job.py TASK``: 0 and 2 average, and 1 and 3."""

import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import thinwire
from tests.optim.subject import FREEZE, HOMES
from tests.optim.training import make_model, train, weights
from tests.refusing import refused
from thinwire.comm import Communicator, threads
from thinwire.zero import ShardedOptimizer

JOB = ("-m", "tests.optim.mesh_job")
TIMEOUT = 2.0

Build = Callable[..., Any]


def _sharded(model: nn.Module, **ranks: Any) -> Any:
    return ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, stage=2, max_norm=1.0, lr=3e-3, **ranks)


def _local(model: nn.Module, **ranks: Any) -> Any:
    return thinwire.DiLoCo(model.named_parameters(), torch.optim.AdamW, every=3, block_size=64, lr=3e-3, **ranks)


def _muon(model: nn.Module, **ranks: Any) -> Any:
    model[4].weight.use_muon = False  # type: ignore[union-attr, index]
    return thinwire.OneBitMuon(model.named_parameters(), lr=1e-2, block_size=64, **ranks)


BUILDS: dict[str, Build] = {
    **{str(one): lambda model, one=one, **ranks: one.build(model, **{"comm": None, **ranks}) for one, *_ in HOMES},
    "ShardedOptimizer": _sharded,
    "DiLoCo": _local,
    "OneBitMuon": _muon,
}


def trained(build: Build, seed: int, **ranks: Any) -> Tensor:
    """The weights of a model of this seed after some steps, which nothing but these ranks can have touched."""
    model = make_model(seed)
    optimizer = build(model, **ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, optimizer, range(FREEZE + 3))
    found = weights(model).clone()
    optimizer.close()
    return found


def alone(build: Build, seed: int) -> list[Tensor]:
    """The same of a job of two ranks."""
    return threads.run(lambda comm: trained(build, seed, comm=comm), 2)


def on_mesh() -> None:
    """Every class that makes its communicator, and the hook, over mesh["dp"] of a job of torch's: the bits of two ranks
    alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name in ("OneBitAdam-0", "ShardedOptimizer", "DiLoCo", "OneBitMuon"):
        build = BUILDS[name]
        expected = alone(build, mesh.get_local_rank("tp"))
        found = trained(build, mesh.get_local_rank("tp"), mesh=mesh["dp"])
        assert torch.equal(found, expected[mesh.get_local_rank("dp")]), name
    hook = thinwire.compress.CompressionState(mesh=mesh["dp"])
    assert list(hook.comm.global_ranks) == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    _refuse(mesh)
    dist.barrier()
    dist.destroy_process_group()


def _refuse(mesh: DeviceMesh) -> None:
    comm = Communicator.of(mesh["dp"])
    for error, message, ranks in (
        (ValueError, r"2 dimensions.*mesh\[\"dp\"\]", {"mesh": mesh}),
        (ValueError, "one of them", {"mesh": mesh["dp"], "comm": comm}),
        (TypeError, "mesh must be a torch DeviceMesh", {"mesh": comm}),
        (TypeError, r"Communicator.of\(\) makes of a group", {"comm": mesh["dp"]}),
    ):
        refused(error, message, thinwire.OneBitAdam, make_model().parameters(), **ranks)
    refused(TypeError, "process group, a DeviceMesh .* of mpi4py was expected", Communicator.of, None)
    lonely = dist.new_group([0])
    if dist.get_rank():
        refused((TypeError, ValueError), "process group|not a member", Communicator.of, lonely)


def over_mpi() -> None:
    """The same over half of MPI's ranks."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    comm = Communicator.of(world.Split(world.rank % 2))
    assert comm.backend == "mpi"
    assert list(comm.global_ranks) == [world.rank % 2, world.rank % 2 + 2]
    for name in ("OneBitAdam-0", "ShardedOptimizer"):
        expected = alone(BUILDS[name], world.rank % 2)[comm.rank]
        assert torch.equal(trained(BUILDS[name], world.rank % 2, comm=comm), expected), name


def lose(when: str) -> None:
    """Rank 3 is killed before the first message of its group, or in a step; rank 1 ends by name, the others train on.

    Rank 0 serves the store, and stays until rank 1 has its error.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if when == "before" and dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    comm = Communicator.of(mesh["dp"], timeout=TIMEOUT)
    store = dist.distributed_c10d._get_default_store()
    try:
        model = make_model()
        optimizer = thinwire.OneBitAdam(model.parameters(), lr=1e-3, freeze_step=2, comm=comm)
        for step in range(8):
            if step == 5 and dist.get_rank() == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, [step])
    except thinwire.comm.CommunicationError:
        store.set("failed", "1")
        raise
    store.wait(["failed"])
    sys.stdout.write(f"rank {dist.get_rank()} trained on\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"on_mesh": on_mesh, "over_mpi": over_mpi, "lose": lose}[sys.argv[1]](*sys.argv[2:])
