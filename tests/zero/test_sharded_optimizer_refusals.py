"""What a sharded optimizer refuses, in words that say what to do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.optim.training import loss_of, make_model
from tests.zero.training import ADAMW, build
from thinwire.comm import Communicator, threads
from thinwire.zero import ShardedOptimizer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage": 3}, "stage must be 0, 1 or 2"),
        ({"param_dtype": torch.float64}, "param_dtype must be"),
        ({"bucket_bytes": 0}, "bucket_bytes must be"),
        ({"max_norm": -1.0}, "max_norm must be"),
        ({"lr": -1.0}, "learning rate"),
    ],
)
def test_bad_options_are_refused_on_every_rank(change: dict, message: str) -> None:
    def body(comm: Communicator) -> None:
        options = {"stage": 1, "comm": comm} | ADAMW | (change if comm.rank == 1 else {})
        expected = message if comm.rank == 1 else "rank 1 could not build its optimizer"
        with pytest.raises((ValueError, TypeError), match=expected):
            ShardedOptimizer(make_model().parameters(), **options)

    threads.run(body, 2)


def test_no_bound_on_the_norm_is_none() -> None:
    assert ShardedOptimizer(make_model().parameters(), max_norm=None, **ADAMW).max_norm == 0.0
    with pytest.raises(
        ValueError, match="max_norm must be a number of at least 0, which does not clip, or None, got '1'"
    ):
        ShardedOptimizer(make_model().parameters(), max_norm="1", **ADAMW)  # type: ignore[arg-type]


def test_ranks_that_differ_are_refused() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="rank 1 and rank 0 differ: stage is 2 against 1"):
            build(comm, make_model(), stage=1 + comm.rank)
        with pytest.raises(ValueError, match="rank 1 and rank 0 differ: parameter 0 has shape"):
            build(comm, nn.Linear(3 + comm.rank, 2), stage=1)

    threads.run(body, 2)


def test_names_must_differ() -> None:
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="two parameters are named 'a'"):
        ShardedOptimizer([one, other], torch.optim.AdamW, named_parameters=[("a", one), ("a", other)], lr=0.1)


def test_wrong_use_is_an_error_that_says_what_to_do() -> None:
    model = make_model()
    comm = threads.run(lambda comm: comm, 1)[0]
    optimizer = build(comm, model, 1)
    loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match="second backward"):
        loss_of(model, 0, 0).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="build a new one"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="nothing to optimize"):
        ShardedOptimizer([torch.zeros(2)], comm=comm, **ADAMW)
    frozen = nn.Linear(2, 2)
    frozen.weight.requires_grad_(False)
    optimizer = build(comm, frozen, 1)
    frozen.weight.requires_grad_(True)
    frozen(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="require gradients now"):
        optimizer.step()


def test_copies_are_refused() -> None:
    optimizer = ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.AdamW, lr=0.1)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
