"""The picture of a comparison is drawn, whatever the runs came to."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from experiments.training import plotting
from experiments.training.trainer import Outcome
from tests.experiments.training.outcomes import outcome


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


def test_a_run_that_diverged_is_drawn_all_the_same(tmp_path: Path) -> None:
    figure, axes = plotting.new_figure(1, "title", "subtitle")
    diverged = outcome(float("nan"), frozen_at=3)
    plotting.draw_comparison(axes[0], [plotting.Series.of("onebit-adam", [diverged])], "loss")
    plotting.save(figure, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_series_average_what_differs_between_seeds() -> None:
    series = plotting.Series.of("onebit-adam", [outcome(2.0, 1000, 20), outcome(3.0, 3000, 40)])
    assert series.frozen_at == 30
    assert series.bytes_sent[-1] == 2000
    assert np.array_equal(series.losses[:, -1], [2.0, 3.0])


def test_labels_are_kept_apart_around_where_they_belong() -> None:
    heights = plotting.spread({"high": 0.9, "low": 0.5, "middle": 0.52, "alone": 0.1}, 0.1)
    assert heights == {
        "alone": pytest.approx(0.1),
        "low": pytest.approx(0.46),
        "middle": pytest.approx(0.56),
        "high": pytest.approx(0.9),
    }


def test_losses_that_fall_to_a_small_fraction_are_drawn_on_a_logarithmic_axis() -> None:
    for final, scale in ((2.0, "linear"), (0.1, "log")):
        run = outcome(final, 1000, 30)
        run.curve.losses[0] = run.curve.losses[1] = 2.4
        _, axes = plotting.new_figure(1, "title", "subtitle")
        plotting.draw_comparison(axes[0], [plotting.Series.of("onebit-adam", [run])], "loss")
        assert axes[0][0].get_yscale() == scale
        low, high = axes[0][0].get_ylim()
        assert 0 < low < final < high


def test_an_outcome_is_read_back_from_its_record() -> None:
    finished, diverged = outcome(2.0, 1000, 30), outcome(float("nan"))
    assert Outcome.of_record(asdict(finished)) == finished
    record = asdict(diverged)
    record["final_loss"] = record["curve"]["losses"][-1] = None
    read = Outcome.of_record(record)
    assert np.isnan(read.final_loss)
    assert np.isnan(read.curve.losses[-1])
