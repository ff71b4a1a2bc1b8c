"""What cannot work is refused on every rank, saying what was given and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thinwire
from tests.optim.diloco.tower import Tower, make, train
from thinwire.comm import Communicator, threads

BAD = [
    ({"every": 0}, ValueError, "every must be a whole number of at least 1"),
    ({"every": 2.5}, ValueError, "every must be a whole number"),
    ({"every": 4, "overlap": 4}, ValueError, "overlap must be a number of steps from 0 up to, not including, every=4"),
    ({"overlap": -1}, ValueError, "overlap"),
    ({"fragments": 5}, ValueError, "fragments=5 for 4 layers"),
    ({"fragments": 0}, ValueError, "fragments"),
    ({"mix": 1.0}, ValueError, "mix must be a number from 0 up to, not including, 1"),
    ({"outer_lr": -0.1}, ValueError, "outer_lr"),
    ({"outer_lr": float("nan")}, ValueError, "outer_lr"),
    ({"outer_momentum": 1.0}, ValueError, "outer_momentum"),
    ({"codec": "int3"}, ValueError, "codec must be"),
    ({"stage": 1}, ValueError, "nodes="),
    ({"stage": 3}, ValueError, "stage must be 0, 1 or 2"),
    ({"nodes": [0]}, ValueError, "nodes must name the node of each"),
    ({"lr": -1.0}, ValueError, "learning rate"),
    ({"no_such_option": 1}, TypeError, "no_such_option"),
    ({"inner": thinwire.OneBitAdam}, ValueError, "OneBitAdam communicates by itself"),
    ({"inner": thinwire.ShardedOptimizer}, ValueError, "ShardedOptimizer communicates by itself"),
    ({"inner": "AdamW"}, TypeError, "inner_class must be an optimizer class"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=[str(one[0]) for one in BAD])
def test_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    def body(comm: Communicator) -> None:
        given = dict(options)
        with pytest.raises(error, match=message):
            make(comm, Tower(), given.pop("inner", torch.optim.SGD), **given)

    threads.run(body, 2)


@pytest.mark.parametrize("name", ["every", "overlap", "fragments", "outer_lr", "codec", "block_size", "mix"])
def test_ranks_that_differ_are_told(name: str) -> None:
    values: dict[str, Any] = {
        "every": (4, 6),
        "overlap": (1, 2),
        "fragments": (1, 2),
        "outer_lr": (0.6, 0.7),
        "codec": ("int8", "none"),
        "block_size": (64, 128),
        "mix": (0.0, 0.5),
    }

    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=f"{name} is .* on rank 0"):
            make(comm, Tower(), **{name: values[name][comm.rank]})

    threads.run(body, 2)


def test_a_fragment_that_does_not_exist_on_some_rank() -> None:
    def body(comm: Communicator) -> None:
        model = Tower()
        if comm.rank == 1:
            del model.layers[3]
        with pytest.raises(ValueError, match="10 parameters against 12 on rank 0"):
            make(comm, model)

    threads.run(body, 2)


def test_outer_settings_that_differ_later_are_found_at_the_next_outer_step() -> None:
    def body(comm: Communicator) -> None:
        model = Tower()
        optimizer = make(comm, model, overlap=0)
        train(model, optimizer, 1, 2)
        if comm.rank == 1:
            optimizer.outer_lr = 0.3
        with pytest.raises(Exception, match="other hyperparameters"):
            train(model, optimizer, 3, 4)

    threads.run(body, 2)


def test_parameters_are_not_added_later() -> None:
    def body(comm: Communicator) -> None:
        optimizer = make(comm, Tower())
        with pytest.raises(RuntimeError, match="cannot be added"):
            optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})

    threads.run(body, 1)
