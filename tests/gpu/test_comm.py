"""GPU tensors over every backend that one GPU allows: threads, staged Gloo and MPI, NCCL with one rank."""

import pytest
import torch
import torch.distributed as dist

from thinwire.comm import Communicator, TorchCommunicator, threads

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def check_on_gpu(comm: Communicator) -> None:
    """Inputs made, and outputs read, on a stream of the rank's own: nothing may be too early."""
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.full((comm.size * 1_000_003,), float(comm.rank), device="cuda")
        moved, summed = torch.empty_like(tensor), tensor.clone()
        gathered = torch.empty(comm.size, tensor.numel(), device="cuda")
        rooted = tensor.clone()
        works = [
            comm.all_to_all(moved, tensor, async_op=True),
            comm.all_reduce(summed, "mean", async_op=True),
            comm.all_gather(gathered, tensor, async_op=True),
            comm.broadcast(rooted, comm.size - 1, async_op=True),
        ]
        for work in works:
            work.wait()
        ranks = torch.arange(comm.size, device="cuda", dtype=torch.float32)
        assert torch.equal(moved.view(comm.size, -1), ranks[:, None].expand(-1, 1_000_003))
        assert bool((summed == (comm.size - 1) / 2).all())
        assert torch.equal(gathered, ranks[:, None].expand_as(gathered))
        assert bool((rooted == comm.size - 1).all())
    assert comm.all_gather_bytes(b"x") == [b"x"] * comm.size
    comm.barrier()


@pytest.mark.parametrize("size", [1, 3])
def test_threads(size):
    threads.run(check_on_gpu, size)


@pytest.mark.parametrize("backend", ["gloo", "nccl", "cpu:gloo,cuda:nccl"])
def test_process_group(backend):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    comm = TorchCommunicator()
    try:
        check_on_gpu(comm)
        copy = comm.duplicate()
        check_on_gpu(copy)
        copy.close()
    finally:
        comm.close()
        dist.destroy_process_group()


def test_mpi():
    mpi_backend = pytest.importorskip("thinwire.comm.mpi_backend")
    check_on_gpu(mpi_backend.MPICommunicator(cuda_aware=False))
