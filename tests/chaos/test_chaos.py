"""A short slice of every harness; `make chaos` does the whole."""

from __future__ import annotations

import importlib

import pytest

from tests.chaos import HARNESSES, configs


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [name for name, counts in HARNESSES.items() if counts.slice])
def test_a_slice(name: str) -> None:
    outcome = importlib.import_module(f"tests.chaos.{name}").run(HARNESSES[name].slice, seed=7)
    assert outcome.tried >= HARNESSES[name].slice
    assert outcome.bad == 0, "\n".join(outcome.examples)


def test_the_seed_decides() -> None:
    assert configs.run(20, 3) == configs.run(20, 3)
