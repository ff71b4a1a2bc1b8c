"""Optimizers with their parameters on a GPU: virtual ranks as threads on one device."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.compress.bodies import decisive_payloads
from tests.optim.subject import LOCAL, SUBJECTS, Subject
from tests.optim.training import batch, make_model, make_optimizer, weights
from thinwire.comm import Communicator, threads
from thinwire.compress import Exchange, make_codec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_exchange_equals_the_algorithm(world_size) -> None:
    payloads, expected = decisive_payloads(world_size, 1000, 100)

    def rank(comm):
        exchange = Exchange(comm, 1000, make_codec("sign1", 64), device="cuda")
        mine = torch.from_numpy(payloads[:, comm.rank]).cuda()
        return torch.stack([exchange.average(vector, step).cpu() for step, vector in enumerate(mine)]).numpy()

    for outputs in threads.run(rank, world_size):
        assert np.linalg.norm(outputs - expected) <= 1e-6 * np.linalg.norm(expected)


def train(comm: Communicator, subject: Subject, device: str, **options) -> torch.Tensor:
    model = make_model().to(device)
    optimizer = subject.build(model, comm, **options)
    for step in range(LOCAL + 4):  # short: later, a sign taken next to 0 may part the two
        inputs, wanted = (tensor.to(device) for tensor in batch(comm.rank, step))
        optimizer.zero_grad()
        (model(inputs) - wanted).square().mean().backward()
        optimizer.step()
    optimizer.synchronize_weights()
    return weights(model).cpu()


@pytest.mark.parametrize(
    ("subject", "options"),
    [
        *((one, {}) for one in SUBJECTS),
        (Subject("OneBitLamb", 0), {"compress": "momentum"}),
        (Subject("OneBitLamb", 1), {"offload": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_agree_bit_for_bit_and_follow_the_cpu(world_size: int, subject: Subject, options: dict) -> None:
    on_gpu, on_cpu = (
        threads.run(partial(train, subject=subject, device=device, **options), world_size) for device in ("cuda", "cpu")
    )
    assert all(torch.equal(one, on_gpu[0]) for one in on_gpu)
    assert (on_gpu[0] - on_cpu[0]).norm() <= 1e-2 * on_cpu[0].norm()


def test_grad_scaler() -> None:
    def rank(comm):
        model = make_model().cuda()
        optimizer = make_optimizer(model, comm, bucket_bytes=400)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
        for step in range(60):
            inputs, wanted = (tensor.cuda() for tensor in batch(comm.rank, step))
            optimizer.zero_grad()
            scaler.scale((model(inputs) - wanted).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return weights(model).cpu(), optimizer.frozen

    results = threads.run(rank, 2)
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1]
