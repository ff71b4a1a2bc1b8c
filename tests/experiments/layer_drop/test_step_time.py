"""Times of steps with layer drop: paired with those without, and read where the formula expects them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from experiments.layer_drop.findings import largest_error
from experiments.layer_drop.step_time import (
    Saving,
    Workload,
    count_kept,
    expected_kept,
    measure_keep_rates,
    measure_savings,
)
from experiments.tasks.sizes import BertSize
from thinwire.pld import ProgressiveLayerDrop, drop_layers


def test_gates_keep_as_often_as_the_formula_says() -> None:
    rates = measure_keep_rates(12, 0.5, 3000)
    assert rates.formula == pytest.approx([1 - layer / 24 for layer in range(1, 13)])
    assert largest_error(rates) < 3
    assert rates.measured != rates.formula


def test_the_floor_of_twelve_layers_is_73_percent() -> None:
    assert expected_kept(12, 0.5) / 12 == pytest.approx(0.7292, abs=1e-4)
    assert expected_kept(5, 1.0) == 5
    assert expected_kept(1, 0.0) == 0


def pairs(kept: Sequence[int], line: tuple[float, float]) -> list[tuple[int, float, float]]:
    """Steps whose time over that of a step with all layers is line[0] + line[1] * kept."""
    random = np.random.default_rng(5)
    without = random.uniform(1, 2, len(kept)).tolist()
    return [(number, (line[0] + line[1] * number) * time, time) for number, time in zip(kept, without, strict=True)]


def test_times_are_read_at_the_expected_number_of_layers() -> None:
    saving = Saving.of(pairs([12, 12, 11, 9, 10, 12, 7], (0.05, 0.08)), 12, 0.5)
    assert saving.ratio == pytest.approx(0.05 + 0.08 * 8.75)
    assert saving.a_layer == pytest.approx(0.08)
    assert saving.expected == pytest.approx(8.75 / 12)


def test_a_disturbed_step_does_not_count() -> None:
    measured = pairs([8, 9, 10] * 5, (0.1, 0.07))
    kept, seconds, without = measured[4]
    measured[4] = (kept, 40 * seconds, without)
    assert Saving.of(measured, 12, 0.5).ratio == pytest.approx(0.1 + 0.07 * 8.75)


def test_steps_that_kept_as_many_layers_scale_with_the_kept() -> None:
    saving = Saving.of(pairs([6, 6], (0.5, 0.0)), 8, 0.5)
    assert saving.ratio == pytest.approx(0.5 + (expected_kept(8, 0.5) - 6) / 8)


def test_kept_layers_of_a_step_are_those_that_ran() -> None:
    layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8, 0.0, norm_first=True) for _ in range(5))
    schedule = ProgressiveLayerDrop(0.2, 5.0)
    drop = drop_layers(layers, schedule, seed=8)
    seen = set()
    for step in range(40):
        schedule.update_state(step)
        hidden = torch.randn(2, 3, 8)
        before = [round(rate * step) if step else 0 for rate in drop.keep_rates]
        for layer in layers:
            hidden = layer(hidden)
        after = [round(rate * (step + 1)) for rate in drop.keep_rates]
        ran = [layer for layer, was, now in zip(layers, before, after, strict=True) if now > was]
        assert count_kept(drop) == len(ran)
        seen.add(len(ran))
    assert len(seen) > 2


def test_every_round_gives_a_pair() -> None:
    workload = Workload(BertSize(3, 16, 2), sequences=2, length=8, theta=0.0)
    savings = measure_savings(workload, rounds=4)
    assert list(savings) == ["the stack", "the whole step"]
    for saving in savings.values():
        assert len(saving.kept) == len(saving.seconds) == len(saving.seconds_without) == 4
        # Settled at 0, the last layer of three is never kept.
        assert max(saving.kept) <= 2
        assert min(saving.seconds + saving.seconds_without) > 0
