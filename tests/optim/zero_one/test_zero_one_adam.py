"""0/1 Adam is the paper's algorithm, sends nothing on local steps, and is bit for bit the same on every rank after a
sync."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import thinwire
from tests.optim.zero_one.reference import ReferenceZeroOneAdam
from tests.optim.zero_one.training import SCHEDULE
from thinwire.comm import threads
from thinwire.optim.formulas import AdamSettings, bound_updates


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
