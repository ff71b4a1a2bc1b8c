"""The sentence on the picture follows from the numbers, whatever they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.common.results import write_json
from experiments.training import plotting
from experiments.training.findings import compare
from experiments.training.reporting import human_bytes
from experiments.training.trainer import Curve, Outcome


def outcome(final_loss: float, bytes_sent: int = 1000, frozen_at: int | None = None, seed: int = 0) -> Outcome:
    """A run of ten validations whose loss falls to `final_loss`."""
    curve = Curve(
        list(range(10, 110, 10)),
        [bytes_sent * point // 10 for point in range(1, 11)],
        [final_loss * (2 - point / 10) for point in range(1, 11)],
    )
    return Outcome(seed, 123, final_loss, bytes_sent, bytes_sent // 100, frozen_at, 1.5, curve)


def test_close_losses_are_called_the_same() -> None:
    finding = compare([outcome(2.0, 3200)], [outcome(2.01, 400, frozen_at=20)])
    assert finding.claim == "same loss (+0.5%), 8.0x fewer bytes, 8x fewer once frozen"
    assert finding.same_loss


def test_a_worse_loss_is_called_worse() -> None:
    finding = compare([outcome(2.0)], [outcome(2.2, 500, frozen_at=20)])
    assert finding.claim == "+10.0% loss, 2.0x fewer bytes, 2x fewer once frozen"
    assert not finding.same_loss


def test_a_better_loss_passes() -> None:
    assert compare([outcome(2.0)], [outcome(1.5, frozen_at=9)]).same_loss


def test_a_run_that_never_froze_says_so() -> None:
    finding = compare([outcome(2.0)], [outcome(2.0)])
    assert finding.fewer_bytes_frozen is None
    assert "never froze" in finding.claim


def test_a_run_that_diverged_says_so(tmp_path: Path) -> None:
    diverged = outcome(float("nan"), frozen_at=3)
    finding = compare([outcome(2.0)], [diverged])
    assert finding.claim == "diverged"
    assert not finding.same_loss
    figure, axes = plotting.new_figure(1, "title", "subtitle")
    plotting.draw_comparison(axes[0], [plotting.Series.of("onebit-adam", [diverged])], "loss")
    plotting.save(figure, tmp_path / "picture.png")


@pytest.mark.parametrize(("onebit", "same"), [(2.15, True), (2.25, False)])
def test_several_seeds_allow_one_standard_deviation(onebit: float, same: bool) -> None:
    finding = compare([outcome(1.8), outcome(2.2), outcome(2.0)], [outcome(onebit, frozen_at=2)] * 3)
    assert finding.exact_deviation == pytest.approx(0.2)
    assert finding.same_loss is same


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (121_000, "121 kB"),
        (3.79e6, "3.79 MB"),
        (2.2e9, "2.2 GB"),
        (5e12, "5 TB"),
    ],
)
def test_bytes_come_with_a_unit(count: float, text: str) -> None:
    assert human_bytes(count) == text


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


def test_json_replaces_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"b": object()})
    assert path.read_text() == '{\n "a": 1\n}\n'
