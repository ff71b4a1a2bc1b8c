"""What 0/1 Adam refuses, and how ranks that come apart are told."""

from __future__ import annotations

import pytest

from tests.optim.training import make_model, train
from tests.optim.zero_one.training import make_zero_one
from thinwire.comm import threads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"var_freeze_step": 0}, "var_freeze_step must be a whole number of at least 1, got 0"),
        ({"var_freeze_step": "auto"}, "var_freeze_step must be a whole number"),
        ({"var_update_scaler": 0}, "var_update_scaler must be a whole number of at least 1, got 0"),
        ({"local_step_scaler": 1.5}, "local_step_scaler must be a whole number of at least 1, got 1.5"),
        ({"local_step_clipper": True}, "local_step_clipper must be a whole number"),
        ({"compress": "gradient"}, "compress must be 'update' or 'momentum'"),
        ({"amsgrad": True}, "amsgrad"),
        ({"codec": "sign2"}, "codec must be"),
    ],
)
def test_bad_options_are_refused(options, message) -> None:
    def rank(comm):
        with pytest.raises(ValueError, match=message):
            make_zero_one(make_model(), comm, **options)

    threads.run(rank, 2)


@pytest.mark.parametrize("name", ["var_update_scaler", "local_step_scaler", "local_step_clipper"])
def test_ranks_that_differ_are_told_on_every_rank(name) -> None:
    def rank(comm):
        with pytest.raises(ValueError, match=f"rank 1 and rank 0 differ: {name} is 8 against 7 on rank 0"):
            make_zero_one(make_model(), comm, **{name: 7 + comm.rank})

    threads.run(rank, 2)


def test_learning_rates_that_differ_between_ranks_are_an_error_at_once() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm)
        train(model, optimizer, range(3))
        optimizer.param_groups[0]["lr"] *= 1 + comm.rank
        with pytest.raises(ValueError, match="rank 1 and rank 0 differ: parameter groups are"):
            train(model, optimizer, range(3, 30))

    threads.run(rank, 2)
