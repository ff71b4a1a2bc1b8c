"""What 1-bit LAMB refuses, on every rank."""

from __future__ import annotations

import pytest

from tests.optim.lamb.training import make_lamb
from tests.optim.training import make_model
from thinwire.comm import threads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_coeff": 0.001}, "min_coeff must be above 0 and at most max_coeff"),
        ({"min_coeff": 0.0}, "min_coeff must be above 0"),
        ({"max_coeff": float("nan")}, "min_coeff must be"),
        ({"coeff_beta": 1.0}, "coeff_beta must be from 0"),
        ({"factor_min": 1.5}, "factor_min must be"),
        ({"factor_max": 0.9}, "factor_max at least 1"),
        ({"factor_threshold": -0.1}, "factor_threshold must be from 0"),
        ({"freeze_step": 0}, "freeze_step must be"),
        ({"amsgrad": True}, "amsgrad=True"),
        ({"compress": "gradient"}, "compress must be"),
    ],
)
def test_bad_options_are_refused_on_every_rank(options, message) -> None:
    def rank(comm):
        with pytest.raises(ValueError, match=message if comm.rank == 1 else "rank 1"):
            make_lamb(make_model(), comm, **(options if comm.rank == 1 else {}))

    threads.run(rank, 2)


@pytest.mark.parametrize("name", ["max_coeff", "factor_threshold", "coeff_beta"])
def test_ranks_that_disagree_are_refused(name) -> None:
    def rank(comm):
        with pytest.raises(ValueError, match="rank 1 and rank 0 differ"):
            make_lamb(make_model(), comm, **{name: 0.5 + comm.rank / 4})

    threads.run(rank, 2)
