"""What several backwards of a step send, and what a GradScaler may do between backward and step."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import thinwire
from tests.optim.training import loss_of, make_model, make_optimizer, weights
from thinwire.comm import threads


def test_gradients_accumulated_in_no_sync_leave_even_where_the_last_backward_does_not_reach_them() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        before = weights(model[0]).clone()
        with optimizer.no_sync():
            loss_of(model, comm.rank, 0).backward()
        model[4].bias.sum().backward()
        optimizer.step()
        return not torch.equal(before, weights(model[0]))

    assert threads.run(rank, 2) == [True, True]


def test_two_losses_over_different_parameters_may_have_their_own_backward() -> None:
    def rank(comm):
        heads = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])
        optimizer = make_optimizer(heads, comm)
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(comm.rank))
        for _ in range(15):
            optimizer.zero_grad()
            heads[0](inputs).square().mean().backward()
            (heads[1](inputs) - 1).square().mean().backward()
            optimizer.step()
        return weights(heads)

    first, second = threads.run(rank, 2)
    assert torch.equal(first, second)


def test_reentrant_checkpointing() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm, freeze_step=4, bucket_bytes=256)
        for step in range(10):
            optimizer.zero_grad()
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), requires_grad=True)
            hidden = torch.utils.checkpoint.checkpoint(model[:2], inputs, use_reentrant=True)
            model[2:](hidden).square().mean().backward()
            optimizer.step()
        return weights(model)

    first, second = threads.run(rank, 2)
    assert torch.equal(first, second)


def test_an_overflow_that_other_ranks_scalers_cannot_see_is_an_error_on_every_rank() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        scaler = torch.amp.GradScaler("cpu")
        before = weights(model).clone()
        loss = model[:2](torch.randn(4, 6)).sum() * (float("inf") if comm.rank == 1 else 1.0)
        scaler.scale(loss).backward()
        with pytest.raises(RuntimeError, match=r"overflowed on ranks \[1\].*took no part in"):
            scaler.step(optimizer)
        return torch.equal(before, weights(model))

    assert threads.run(rank, 2) == [True, True]


def test_an_overflow_everywhere_with_an_unused_parameter_is_an_ordinary_skip() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(6):
            optimizer.zero_grad()
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step + comm.rank))
            # Everywhere in the first step; later on one rank, which then ends within backward and reaches all scalers.
            bad = step == 0 or (step == 3 and comm.rank == 1)
            scaler.scale(model[:2](inputs).square().sum() * (float("inf") if bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), optimizer.skipped_steps, weights(model)

    first, second = threads.run(rank, 2)
    assert first[:2] == second[:2] == (2.0**8, 2)
    assert torch.equal(first[2], second[2])


def test_unscaling_before_step_is_an_error_that_says_what_to_do() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, comm.rank, 0)).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) was called.*delete the call"):
            scaler.step(optimizer)

    threads.run(rank, 2)


def test_an_infinite_gradient_where_coordinates_stay_still_skips_the_step() -> None:
    def rank(comm, compress):
        weight = nn.Parameter(torch.ones(64))
        optimizer = thinwire.OneBitAdam([weight], freeze_step=2, block_size=64, compress=compress, comm=comm)
        for step in range(6):
            weight.grad = torch.ones(64)
            weight.grad[10] = float("inf") if step == 4 and comm.rank == 1 else 0.0
            optimizer.step()
        return optimizer.skipped_steps, bool(torch.isfinite(weight).all())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for compress in ("update", "momentum"):
            assert threads.run(lambda comm, compress=compress: rank(comm, compress), 2) == [(1, True)] * 2
