"""The picture of a comparison is drawn, whatever the runs came to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.training import plotting
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
