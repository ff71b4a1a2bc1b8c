"""0/1 Adam is the paper's algorithm, sends nothing on local steps, and is bit for bit the same on every rank after a
sync."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import thinwire
from tests.optim.training import loss_of, make_model, train, weights
from tests.optim.zero_one.reference import ReferenceZeroOneAdam
from tests.optim.zero_one.training import SCHEDULE, make_zero_one
from thinwire.comm import threads
from thinwire.optim.adam import bound_updates
from thinwire.optim.algorithm import AdamSettings


@pytest.mark.parametrize("options", [{}, {"weight_decay": 2.0, "betas": (0.8, 0.99), "eps": 1e-6}])
@pytest.mark.parametrize(("compress", "growth"), [("update", 1.0), ("update", 40.0), ("momentum", 1.0)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_equals_the_algorithm_in_float64_over_120_steps(world_size, growth, compress, options) -> None:
    numel, steps = 300, 120
    rng = np.random.default_rng(world_size)
    start = rng.standard_normal(numel).astype(np.float32)
    gradients = (rng.standard_normal((steps, world_size, numel)) + 0.3).astype(np.float32)
    gradients[20:] *= growth  # of which the variance knows too little, or nothing: updates meet their bound
    settings = {"lr": 1e-2, "block_size": 64, "compress": compress} | SCHEDULE | options
    reference = ReferenceZeroOneAdam(start, world_size, **settings)
    expected = []
    for payloads in gradients:
        reference.step(payloads.astype(np.float64))
        expected.append(reference.weights.copy())
    assert set(reference.kinds) == set("ecls")

    def rank(comm):
        weight = nn.Parameter(torch.from_numpy(start.copy()))
        optimizer = thinwire.ZeroOneAdam([weight], comm=comm, **settings)
        found, in_sync = [], []
        for payloads in gradients:
            weight.grad = torch.from_numpy(payloads[comm.rank])
            optimizer.step()
            found.append(weight.detach().double().numpy())
            in_sync.append(optimizer.in_sync)
        return found, in_sync

    results = threads.run(rank, world_size)
    for number, (found, in_sync) in enumerate(results):
        assert in_sync == [kind != "l" for kind in reference.kinds]
        for step in range(steps):
            moved = np.linalg.norm(expected[step][number] - start)
            rounding = 1e-7 * np.linalg.norm(start)  # of weights to fp32, which no optimizer escapes
            assert np.linalg.norm(found[step] - expected[step][number]) <= 1e-5 * moved + rounding, step
    for step in np.flatnonzero(results[0][1]):
        assert all(np.array_equal(found[step], results[0][0][step]) for found, _ in results)


def test_an_update_is_bounded_bit_for_bit_below_its_bound_and_never_hides_what_is_not_finite() -> None:
    settings = AdamSettings(1e-3, 0.9, 0.99, 1e-8, 0.0, True, False)
    updates = torch.cat([torch.randn(1000), torch.tensor([0.0, 7.0, -7.0, float("inf"), -float("inf"), float("nan")])])
    bounded = updates.clone()
    bound_updates(bounded, settings, ranks=9)
    assert torch.equal(bounded[:1001], updates[:1001].clamp(-3.0, 3.0))
    assert bounded[1001:1003].tolist() == [3.0, -3.0]
    assert bool(bounded[1003:].isnan().all())


def test_without_ranks_and_slow_variances_the_bound_is_the_papers() -> None:
    updates = torch.tensor([1e9])
    bound_updates(updates, AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.0, True, False), ranks=1)
    assert updates.item() == pytest.approx(0.1 / 0.001**0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_it_learns_and_agrees_after_every_sync(dtype) -> None:
    def rank(comm):
        model = make_model(seed=comm.rank, dtype=dtype)
        optimizer = make_zero_one(model, comm)
        seen = []
        losses = train(model, optimizer, range(100), lambda step: seen.append((optimizer.in_sync, weights(model))))
        assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
        return seen

    results = threads.run(rank, 3)
    for (in_sync, first), *others in zip(*results, strict=True):
        alike = all(torch.equal(first, other) for _, other in others)
        assert alike == in_sync


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "lr": 0.02, "betas": (0.8, 0.99), "eps": 1e-6}])
def test_while_every_step_is_exact_it_is_adamw(options) -> None:
    """Torch's within two roundings a step."""

    def rank(comm):
        model, twin = make_model(), make_model()
        optimizer = make_zero_one(
            model, comm, **options, compress="momentum", var_freeze_step=100, var_update_scaler=100
        )
        adamw = torch.optim.AdamW(twin.parameters(), **({"lr": 3e-3, "weight_decay": 0.0} | options))
        for step in range(30):
            by_rank = [
                torch.autograd.grad(loss_of(twin, other, step), list(twin.parameters())) for other in range(comm.size)
            ]
            for parameter, gradient in zip(model.parameters(), by_rank[comm.rank], strict=True):
                parameter.grad = gradient.clone()
            for parameter, *gradients in zip(twin.parameters(), *by_rank, strict=True):
                parameter.grad = sum(gradients) / comm.size
            optimizer.step()
            adamw.step()
        bound = 2 * 30 * 2**-24 * float(weights(twin).abs().max())
        torch.testing.assert_close(weights(model), weights(twin), rtol=0, atol=bound)

    threads.run(rank, 3)


def test_coordinates_without_variance_stay_and_mask_holds() -> None:
    def rank(comm):
        embedding = nn.Embedding(10, 8)
        embedding.weight.data.normal_(generator=torch.Generator().manual_seed(0))
        mask = torch.ones(1, 8)
        mask[0, 6:] = 0
        groups = [{"params": embedding.parameters(), "exp_avg_mask": mask}]
        optimizer = thinwire.ZeroOneAdam(groups, lr=0.1, block_size=64, comm=comm, **SCHEDULE)
        before = embedding.weight.detach().clone()
        for step in range(70):
            optimizer.zero_grad()
            (embedding(torch.tensor([0, 1, 2 + step % 2])) - 1).square().sum().backward()
            optimizer.step()
        moved = embedding.weight != before
        assert moved[:4, :6].all()
        assert not moved[4:].any()
        assert not moved[:, 6:].any()
        return embedding.weight.abs().max().item()

    assert max(threads.run(rank, 2)) < 5


def test_by_nodes_it_learns_and_agrees_after_every_sync() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm, nodes=[0, 0, 1])
        seen = []
        losses = train(model, optimizer, range(100), lambda step: seen.append((optimizer.in_sync, weights(model))))
        assert np.mean(losses[-10:]) < np.mean(losses[:5])
        return seen

    results = threads.run(rank, 3)
    for (in_sync, first), *others in zip(*results, strict=True):
        assert all(torch.equal(first, other) for _, other in others) == in_sync
