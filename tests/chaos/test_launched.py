"""A slice of the faults of real ranks."""

from __future__ import annotations

import pytest

from tests.chaos import launched


@pytest.mark.launch
@pytest.mark.parametrize(
    "trial",
    [
        launched.Trial("gloo", "adamw-3", "another rate", 1, 2),
        launched.Trial("mpi", "onebit-1", "another thinwire", 2, 1),
    ],
    ids=lambda trial: trial.backend,
)
def test_a_trial(trial: launched.Trial) -> None:
    if trial.backend not in launched.backends():
        pytest.skip("no mpirun")
    assert launched.faults(trial) == []
