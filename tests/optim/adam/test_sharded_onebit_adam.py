"""1-bit Adam on sharded state against 1-bit Adam on whole state: the same losses, replicas that stay equal, and
residuals that steps which are not taken leave alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import thinwire
from tests.optim.training import loss_of, make_model, make_optimizer, train, weights
from thinwire.comm import Communicator, threads
from thinwire.zero import ReplicaDriftError
from thinwire.zero.bucket_layout import frozen_state_formula

FREEZE = 15


def build(comm: Communicator, stage: int, **options) -> tuple[nn.Module, thinwire.OneBitAdam]:
    model = make_model()
    options = {"bucket_bytes": 1000, "on_drift": "raise", "resync_interval": 7, "freeze_step": FREEZE} | options
    return model, make_optimizer(model, comm, stage=stage, named_parameters=model.named_parameters(), **options)


def test_stages_1_and_2_give_the_same_bits_and_nearly_those_of_stage_0() -> None:
    def body(comm: Communicator, stage: int) -> tuple[Tensor, float]:
        model, optimizer = build(comm, stage)
        losses = train(model, optimizer, range(60))
        return weights(model), sum(losses[-30:])

    whole, first, second = (threads.run(lambda comm, stage=stage: body(comm, stage), 3) for stage in (0, 1, 2))
    assert all(torch.equal(mine, first[0][0]) for mine, _ in (*first, *second))
    # 8 bits of preconditioner and another order of buckets are the difference.
    assert sum(of_rank for _, of_rank in first) == pytest.approx(sum(of_rank for _, of_rank in whole), rel=0.03)


def test_drift_is_an_error_or_is_repaired() -> None:
    def body(comm: Communicator, on_drift: str) -> Tensor:
        model, optimizer = build(comm, 1, param_dtype=torch.bfloat16, on_drift=on_drift, resync_interval=5)
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


@pytest.mark.parametrize("overflows", [True, False])
def test_a_step_that_is_not_taken_leaves_nothing_behind(overflows: bool) -> None:
    """A residual that was not kept starts again from zero, however large the gradients were that it had taken in."""

    def body(comm: Communicator) -> None:
        model, optimizer = build(comm, 1)
        train(model, optimizer, range(FREEZE + 4))
        before = weights(model)
        train(model, optimizer, [FREEZE + 4])
        usual = (weights(model) - before).abs().max()
        optimizer.zero_grad()
        loss = 1e6 * loss_of(model, comm.rank, 99)
        if overflows and comm.rank == 0:
            loss = loss + 0 * next(model.parameters()).flatten()[0] * math.inf
        loss.backward()
        if overflows:
            optimizer.step()
            assert not optimizer.last_step.applied
        optimizer.zero_grad()
        before = weights(model)
        train(model, optimizer, range(FREEZE + 5, FREEZE + 8))
        assert (weights(model) - before).abs().max() < 20 * usual

    threads.run(body, 2)


@given(parameters=st.integers(0, 10**12), ranks=st.integers(1, 10**4))
def test_formulas(parameters: int, ranks: int) -> None:
    for expected, formula in [
        (5.125 + 8 / ranks, frozen_state_formula(parameters, ranks)),
        (9.125 + 4 / ranks, frozen_state_formula(parameters, ranks, element_bytes=4)),
        (9.125 + 8 / ranks, frozen_state_formula(parameters, ranks, element_bytes=4, fresh_variance=True)),
    ]:
        assert sum(formula.values()) == pytest.approx(parameters * expected)
