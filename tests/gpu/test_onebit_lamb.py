"""1-bit LAMB, whole and sharded, with its parameters on a GPU, ranks as threads: the same bits on all, and the
CPU's weights."""

from __future__ import annotations

import pytest
import torch

from tests.optim.training import batch, make_model
from thinwire import OneBitLamb
from thinwire.comm import threads

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize(
    "options",
    [{}, {"compress": "momentum"}, {"stage": 1}, {"stage": 1, "offload": True}],
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_agree_bit_for_bit_and_follow_the_cpu(world_size, options) -> None:
    def train(comm, device):
        model = make_model().to(device)
        optimizer = OneBitLamb(
            model.parameters(),
            lr=1e-2,
            freeze_step=10,
            weight_decay=0.01,
            block_size=64,
            bucket_bytes=400,
            comm=comm,
            **options,
        )
        for step in range(15):  # short: later, a sign taken next to 0 may part the two
            inputs, wanted = (tensor.to(device) for tensor in batch(comm.rank, step))
            optimizer.zero_grad()
            (model(inputs) - wanted).square().mean().backward()
            optimizer.step()
        return torch.cat([parameter.detach().reshape(-1).cpu() for parameter in model.parameters()])

    on_gpu = threads.run(lambda comm: train(comm, "cuda"), world_size)
    on_cpu = threads.run(lambda comm: train(comm, "cpu"), world_size)
    assert all(torch.equal(one, on_gpu[0]) for one in on_gpu)
    assert (on_gpu[0] - on_cpu[0]).norm() <= 1e-2 * on_cpu[0].norm()
