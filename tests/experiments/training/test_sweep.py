"""A best learning rate has worse ones on both sides, where the search can find them."""

from __future__ import annotations

from math import inf, log, nan

import pytest

from experiments.training.sweep import best_rate, sweep


def bowl(best: float) -> tuple[list[float], object]:
    """Rates asked for, and a loss that is lowest at `best`."""
    asked: list[float] = []

    def loss(rate: float) -> float:
        asked.append(rate)
        return abs(log(rate / best))

    return asked, loss


def test_a_best_rate_inside_the_grid_ends_the_search() -> None:
    asked, loss = bowl(0.004)
    assert best_rate(sweep(loss, (0.002, 0.004, 0.008))) == 0.004
    assert asked == [0.002, 0.004, 0.008]


@pytest.mark.parametrize(("best", "tried"), [(0.001, [0.0005, 0.001]), (0.016, [0.016, 0.032])])
def test_a_best_rate_at_an_end_is_followed(best: float, tried: list[float]) -> None:
    _, loss = bowl(best)
    losses = sweep(loss, (0.002, 0.004, 0.008))
    assert best_rate(losses) == best
    assert list(losses) == sorted({*tried, 0.002, 0.004, 0.008})


def test_the_search_gives_up() -> None:
    asked, loss = bowl(1e9)
    losses = sweep(loss, (0.5, 1.0))
    assert asked == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    assert best_rate(losses) == 16.0


def test_what_breaks_down_is_never_the_best() -> None:
    assert best_rate({0.1: nan, 0.2: 3.0, 0.3: -inf}) == 0.2
    assert sweep(lambda rate: 1.0 if rate < 0.3 else nan, (0.1, 0.2, 0.4)).keys() >= {0.05, 0.1, 0.2, 0.4}
