"""1-bit Adam and LAMB with their parameters on a GPU: virtual ranks as threads on one device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.compress.bodies import decisive_payloads
from tests.optim.training import batch, make_model, make_optimizer
from thinwire import OneBitLamb
from thinwire.comm import threads
from thinwire.compress import Exchange, make_codec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def train_on_gpu(comm, steps, scaler=None):
    model = make_model().cuda()
    optimizer = make_optimizer(model, comm, bucket_bytes=400)
    scaler = scaler or torch.amp.GradScaler("cuda", enabled=False)
    losses = []
    for step in range(steps):
        inputs, wanted = (tensor.cuda() for tensor in batch(comm.rank, step))
        optimizer.zero_grad()
        loss = (model(inputs) - wanted).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, torch.cat([parameter.detach().reshape(-1).cpu() for parameter in model.parameters()]), optimizer


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_exchange_equals_the_algorithm(world_size) -> None:
    payloads, expected = decisive_payloads(world_size, 1000, 100)

    def rank(comm):
        exchange = Exchange(comm, 1000, make_codec("sign1", 64), device="cuda")
        mine = torch.from_numpy(payloads[:, comm.rank]).cuda()
        return torch.stack([exchange.average(vector, step).cpu() for step, vector in enumerate(mine)]).numpy()

    for outputs in threads.run(rank, world_size):
        assert np.linalg.norm(outputs - expected) <= 1e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_agree_bit_for_bit_and_learn(world_size) -> None:
    results = threads.run(lambda comm: train_on_gpu(comm, 200)[:2], world_size)
    assert all(torch.equal(result[1], results[0][1]) for result in results)
    assert np.mean(results[0][0][-20:]) < 0.8 * np.mean(results[0][0][:5])


def test_grad_scaler() -> None:
    def rank(comm):
        losses, weights, optimizer = train_on_gpu(comm, 60, torch.amp.GradScaler("cuda", init_scale=2.0**8))
        return losses, weights, optimizer.frozen

    results = threads.run(rank, 2)
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2]


@pytest.mark.parametrize("options", [{}, {"compress": "momentum"}, {"stage": 1}, {"stage": 1, "offload": True}])
@pytest.mark.parametrize("world_size", [1, 3])
def test_lamb_agrees_bit_for_bit_and_follows_the_cpu(world_size, options) -> None:
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
