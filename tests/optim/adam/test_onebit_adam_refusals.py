"""What 1-bit Adam refuses, and how ranks that come apart are told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire
from tests.optim.training import loss_of, make_model, make_optimizer, train
from thinwire.comm import CommunicationError, threads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "amsgrad=True cannot work"),
        ({"eps": 0.0}, "eps must be above 0"),
        ({"freeze_step": 0}, "freeze_step must be"),
        ({"freeze_step": -5}, "freeze_step must be"),
        ({"freeze_step": 2.5}, "freeze_step must be"),
        ({"freeze_step": "soon"}, "freeze_step must be"),
        ({"freeze_step": 0, "stage": 1}, "freeze_step must be"),
        ({"compress": "gradient"}, "compress must be"),
        ({"codec": "topk"}, "codec must be"),
        ({"warmup_wire": "fp8"}, "warmup_wire must be"),
    ],
)
def test_bad_options_are_refused_at_construction(options, message) -> None:
    def rank(comm):
        with pytest.raises(ValueError, match=message):
            thinwire.OneBitAdam(make_model().parameters(), comm=comm, **options)

    threads.run(rank, 2)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"betas": (0.9, 1.5)}, "betas must be"),
        ({"exp_avg_mask": torch.ones(3, 5)}, r"exp_avg_mask of shape \(3, 5\) does not broadcast"),
    ],
)
def test_a_bad_group_is_refused_and_not_kept(group, message) -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model[:2], comm)
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [model[2].weight]} | group)
        optimizer.add_param_group({"params": [model[2].weight]})
        return len(optimizer.param_groups)

    assert threads.run(rank, 2) == [2, 2]


def test_masks_that_differ_between_ranks_are_an_error() -> None:
    def rank(comm):
        mask = torch.ones(3)
        mask[comm.rank] = 0
        with pytest.raises(ValueError, match="rank 1 and rank 0 differ"):
            thinwire.OneBitAdam([{"params": [nn.Parameter(torch.zeros(3))], "exp_avg_mask": mask}], comm=comm)

    threads.run(rank, 2)


def test_sparse_gradients_are_refused() -> None:
    def rank(comm):
        embedding = nn.Embedding(10, 4, sparse=True)
        optimizer = make_optimizer(embedding, comm)
        with pytest.raises(ValueError, match=r"has a sparse gradient.*sparse=False"):
            embedding(torch.tensor([1, 2])).sum().backward()
        assert not optimizer.frozen

    threads.run(rank, 2)


def test_what_a_frozen_stage_cannot_do_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    with pytest.raises(ValueError, match="no maximize"):
        thinwire.OneBitAdam([{"params": [weight], "maximize": True}], stage=1)
    with pytest.raises(ValueError, match=r"exp_avg_mask of shape \(4, 2\) does not broadcast"):
        thinwire.OneBitAdam([{"params": [weight], "exp_avg_mask": torch.ones(4, 2)}], stage=1)
    with pytest.raises(ValueError, match="reversible=False does not go with max_norm"):
        thinwire.OneBitAdam([weight], max_norm=1.0, reversible=False, stage=1)


def test_a_rank_that_drops_a_step_alone_is_found_out_at_the_next() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        train(model, optimizer, range(3))
        optimizer.zero_grad()
        loss_of(model, comm.rank, 3).backward()
        if comm.rank == 1:
            optimizer.zero_grad()
        else:
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(CommunicationError, match=r"rank \d sent a packet of step \d where step \d was expected"):
            loss_of(model, comm.rank, 4).backward()

    threads.run(rank, 2)


def test_learning_rates_that_differ_between_ranks_are_an_error_at_once() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm, freeze_step="auto")
        train(model, optimizer, range(5))
        optimizer.param_groups[0]["lr"] *= 1 + comm.rank
        with pytest.raises(ValueError, match=r"rank 1 and rank 0 differ: parameter groups are \[{'lr': 0.006"):
            train(model, optimizer, range(5, 20))

    threads.run(rank, 2)


def test_requires_grad_that_differs_between_ranks_is_an_error() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        model[0].bias.requires_grad_(comm.rank == 0)
        with pytest.raises(ValueError, match=r"disagree on whether parameter 1 of group 0.* requires a gradient"):
            train(model, optimizer, [0])

    threads.run(rank, 2)


def test_unfreezing_a_parameter_on_one_rank_only_is_an_error_on_every_rank() -> None:
    def rank(comm):
        model = make_model()
        model[0].requires_grad_(False)
        optimizer = make_optimizer(model, comm)
        train(model, optimizer, range(4))
        model[0].requires_grad_(comm.rank == 1)
        with pytest.raises(ValueError, match=r"rank 1 and rank 0 differ: requires_grad\[0\] is True against False"):
            train(model, optimizer, [4])

    threads.run(rank, 2)
