"""1-bit Adam on sharded state against 1-bit Adam on whole state: the same losses, replicas that stay equal, and
residuals that steps which are not taken leave alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import thinwire
from tests.optim.adam.sharded import FREEZE, build
from tests.optim.training import loss_of, make_model, train, weights
from tests.zero.saved import Saved, join, save
from thinwire.comm import Communicator, threads
from thinwire.zero import ReplicaDriftError


def run(ranks: int, stage: int, steps: int, **options) -> list[tuple[Tensor, list[float]]]:
    def body(comm: Communicator) -> tuple[Tensor, list[float]]:
        model = make_model()
        losses = train(model, build(comm, model, stage, **options), range(steps))
        return weights(model), losses

    return threads.run(body, ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_stages_1_and_2_give_the_same_bits_and_nearly_those_of_stage_0(ranks: int) -> None:
    def whole(comm: Communicator) -> list[float]:
        model = make_model()
        optimizer = thinwire.OneBitAdam(
            model.parameters(), lr=3e-3, freeze_step=FREEZE, comm=comm, block_size=64, bucket_bytes=1000
        )
        return train(model, optimizer, range(90))

    of_stage = [run(ranks, stage, 90) for stage in (1, 2)]
    for of_rank in of_stage:
        for mine, _ in of_rank:
            assert torch.equal(mine, of_stage[0][0][0])
    mean = sum(sum(losses[-40:]) for _, losses in of_stage[0]) / 40 / ranks
    expected = sum(sum(losses[-40:]) for losses in threads.run(whole, ranks)) / 40 / ranks
    # 8 bits of preconditioner and another order of buckets are the difference.
    assert mean == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stage", [1, 2])
def test_16_bit_replicas_stay_equal_on_all_ranks_and_near_the_master_weights(dtype: torch.dtype, stage: int) -> None:
    def body(comm: Communicator) -> tuple[Tensor, Saved | None]:
        model = make_model()
        optimizer = build(comm, model, stage, param_dtype=dtype)
        train(model, optimizer, range(FREEZE + 25))
        return weights(model), save(comm, optimizer)

    outcomes = threads.run(body, 3)
    assert all(torch.equal(mine, outcomes[0][0]) for mine, _ in outcomes)
    saved = join([part for _, part in outcomes])
    sizes = {name: parameter.numel() for name, parameter in make_model().named_parameters()}
    masters = torch.cat([saved.read("master", name, 0, numel) for name, numel in sizes.items()])
    # Four steps since the last copy of the master weights: at most that many units in the last place.
    bits = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    torch.testing.assert_close(outcomes[0][0], masters, rtol=5 * bits, atol=1e-5)


def test_a_clipped_spike_moves_the_momentum_and_the_residuals_as_if_it_had_been_small() -> None:
    """Spike times clip: what is sent, and what is remembered, must be near what the small gradient gives."""

    def body(comm: Communicator, spike: float) -> tuple[Tensor, float]:
        model = make_model()
        optimizer = build(comm, model, 1, max_norm=1e-3, resync_interval=1000)
        train(model, optimizer, range(FREEZE + 3))
        optimizer.zero_grad()
        (spike * loss_of(model, comm.rank, 999)).backward()
        optimizer.step()
        residual = torch.cat(list(optimizer.rank_tensors().values()))
        return weights(model), float(residual.norm())

    plain = threads.run(lambda comm: body(comm, 1.0), 2)
    spiked = threads.run(lambda comm: body(comm, 1e6), 2)
    for (_, residual), (_, spiked_residual) in zip(plain, spiked, strict=True):
        assert spiked_residual == pytest.approx(residual, rel=0.5)
    # One step of 3e-3 an element at most lies between two models that were equal before it.
    assert float((plain[0][0] - spiked[0][0]).abs().max()) < 1.5e-2


def test_without_reversible_residuals_stay_finite_after_an_overflow() -> None:
    def body(comm: Communicator) -> None:
        model = make_model()
        optimizer = build(comm, model, 1, param_dtype=torch.bfloat16)
        train(model, optimizer, range(FREEZE + 4))
        optimizer.zero_grad()
        (loss_of(model, comm.rank, 500) * math.nan).backward()
        optimizer.step()
        assert not optimizer.last_step.applied
        assert all(bool(residual.isfinite().all()) for residual in optimizer.rank_tensors().values())
        losses = train(model, optimizer, range(501, 520))
        assert sum(losses) / len(losses) < 0.2

    threads.run(body, 2)


def test_drift_is_an_error_or_is_repaired() -> None:
    def body(comm: Communicator, on_drift: str) -> Tensor:
        model = make_model()
        optimizer = build(comm, model, 1, param_dtype=torch.bfloat16, on_drift=on_drift, resync_interval=5)
        train(model, optimizer, range(FREEZE + 2))
        if comm.rank == 1:
            with torch.no_grad():
                model[0].weight[0, 0] += 1.0
        train(model, optimizer, range(FREEZE + 2, FREEZE + 5))
        return weights(model)

    with pytest.raises(ReplicaDriftError, match=r"ranks \[1\] differ from rank 0's after step 20"):
        threads.run(lambda comm: body(comm, "raise"), 3)
    with pytest.warns(RuntimeWarning, match="repaired from the owners' master weights"):
        of_rank = threads.run(lambda comm: body(comm, "repair"), 3)
    assert all(torch.equal(mine, of_rank[0]) for mine in of_rank)


def test_auto_freezes_both_stages_at_the_same_step() -> None:
    def body(comm: Communicator, stage: int) -> int | None:
        model = make_model()
        # Next to no learning rate: gradients whose variance settles.
        optimizer = build(comm, model, stage, freeze_step="auto", betas=(0.9, 0.9), lr=1e-6)
        train(model, optimizer, range(60))
        return optimizer.frozen_at

    taken = {step for stage in (1, 2) for step in threads.run(lambda comm, s=stage: body(comm, s), 2)}
    assert len(taken) == 1
    assert taken.pop() is not None


@pytest.mark.parametrize("how", ["overflow", "dropped"])
def test_a_step_that_is_not_taken_leaves_nothing_behind(how) -> None:
    """A residual that was not kept starts again from zero, however large the gradients were that it had taken in."""

    def body(comm: Communicator) -> None:
        model = make_model()
        optimizer = build(comm, model, 1)
        train(model, optimizer, range(FREEZE + 4))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        train(model, optimizer, [FREEZE + 4])
        usual = max(
            float((new.detach() - old).abs().max()) for new, old in zip(model.parameters(), before, strict=True)
        )
        optimizer.zero_grad()
        loss = 1e6 * loss_of(model, comm.rank, 99)
        if how == "overflow" and comm.rank == 0:
            loss = loss + 0 * next(model.parameters()).flatten()[0] * math.inf
        loss.backward()
        if how == "overflow":
            optimizer.step()
            assert not optimizer.last_step.applied
        optimizer.zero_grad()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        train(model, optimizer, range(FREEZE + 5, FREEZE + 8))
        moved = max(
            float((new.detach() - old).abs().max()) for new, old in zip(model.parameters(), before, strict=True)
        )
        assert moved < 20 * usual

    threads.run(body, 2)
