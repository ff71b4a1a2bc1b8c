"""Findings, sentences, sweeps and pictures follow from the numbers, whatever they are."""

from __future__ import annotations

from dataclasses import asdict
from math import inf, log, nan
from pathlib import Path

import numpy as np
import pytest

from experiments.training import plotting
from experiments.training.findings import compare, headline
from experiments.training.sweep import best_rate, sweep
from experiments.training.trainer import Outcome
from tests.experiments.training.outcomes import outcome


def test_a_run_that_diverged_says_so() -> None:
    diverged = outcome(float("nan"), frozen_at=3)
    finding = compare([outcome(2.0)] * 2, [diverged, outcome(2.0, frozen_at=3)])
    assert finding.claim == "diverged"
    assert not finding.same_loss


@pytest.mark.parametrize(("onebit", "same"), [(2.15, True), (2.25, False)])
def test_several_seeds_allow_one_standard_deviation(onebit: float, same: bool) -> None:
    finding = compare([outcome(1.8), outcome(2.2), outcome(2.0)], [outcome(onebit, frozen_at=2)] * 3)
    assert finding.exact_deviation == pytest.approx(0.2)
    assert finding.same_loss is same


def test_a_headline_says_the_fewest_bytes_and_the_worst_loss() -> None:
    better = compare([outcome(2.0, 3200)], [outcome(1.9, 100, frozen_at=20)])
    worse = compare([outcome(2.0, 3200)], [outcome(2.06, 800, frozen_at=20)])
    assert (
        headline("1-bit Adam", "AdamW", [better]) == "1-bit Adam sends 32x fewer bytes and ends 5.0% below AdamW's loss"
    )
    both = headline("1-bit Adam", "AdamW", [better, worse])
    assert both == "1-bit Adam sends 4.0x to 32x fewer bytes and ends at most 3.0% above AdamW's loss"
    diverged = compare([outcome(2.0)], [outcome(float("nan"), frozen_at=3)])
    assert headline("1-bit Adam", "AdamW", [better, diverged]) == "1-bit Adam diverged"


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


def test_what_breaks_down_is_never_the_best() -> None:
    assert best_rate({0.1: nan, 0.2: 3.0, 0.3: -inf}) == 0.2
    assert sweep(lambda rate: 1.0 if rate < 0.3 else nan, (0.1, 0.2, 0.4)).keys() >= {0.05, 0.1, 0.2, 0.4}


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("sent", [0, 10**9])
def test_the_picture_is_drawn(tmp_path: Path, seeds: int, sent: int) -> None:
    figure, axes = plotting.new_figure(2, "title", "subtitle")
    for row in axes:
        series = [
            plotting.Series.of("adamw", [outcome(2.0 + seed / 10, sent) for seed in range(seeds)]),
            plotting.Series.of("onebit-adam", [outcome(2.1 + seed / 10, sent // 9, 30) for seed in range(seeds)]),
        ]
        plotting.draw_comparison(row, series, "loss", plotting.Reference(3.0, "chance"))
        plotting.title_row(row, "a row")
    plotting.save(figure, tmp_path / "picture.png")
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_series_average_what_differs_between_seeds() -> None:
    series = plotting.Series.of("onebit-adam", [outcome(2.0, 1000, 20), outcome(3.0, 3000, 40)])
    assert series.frozen_at == 30
    assert series.bytes_sent[-1] == 2000
    assert np.array_equal(series.losses[:, -1], [2.0, 3.0])


def test_an_outcome_is_read_back_from_its_record() -> None:
    finished, diverged = outcome(2.0, 1000, 30), outcome(float("nan"))
    assert Outcome.of_record(asdict(finished)) == finished
    record = asdict(diverged)
    record["final_loss"] = record["curve"]["losses"][-1] = None
    read = Outcome.of_record(record)
    assert np.isnan(read.final_loss)
    assert np.isnan(read.curve.losses[-1])
