"""What the runs say: means, differences seed by seed, bytes after the freeze."""

from __future__ import annotations

import pytest

from experiments.text_classification.findings import find, frozen_bytes, sentence
from experiments.text_classification.learning import Outcome


def outcome(method: str, seed: int, test: float, interface: list[float]) -> Outcome:
    return Outcome(method, 1e-3, seed, validation=test, test=test, interface=interface)


RUNS = {
    "adamw": [outcome("adamw", seed, test, [100.0] * 6) for seed, test in enumerate((90.0, 92.0))],
    "onebit-adam": [
        outcome("onebit-adam", seed, test, [100.0, 100.0, 50.0, 4.0, 4.0, 4.0])
        for seed, test in enumerate((90.4, 92.0))
    ],
}
SWEPT = {"adamw": {5e-4: 11.0, 1e-3: 10.0, 2e-3: 12.0}, "onebit-adam": {1e-3: 9.0, 2e-3: 9.5}}


def test_figures() -> None:
    found = find(SWEPT, RUNS, freeze_step=2)
    adamw, onebit = found["adamw"], found["onebit-adam"]
    assert (adamw.test, adamw.points, adamw.fewer_bytes_frozen) == (91.0, 0.0, 1.0)
    assert onebit.test == pytest.approx(91.2)
    assert onebit.points == pytest.approx(0.2)
    assert onebit.points_deviation == pytest.approx(0.2 * 2**0.5)
    assert (onebit.frozen_bytes, onebit.fewer_bytes_frozen) == (4.0, 25.0)
    assert onebit.fewer_bytes == pytest.approx(600 / 262)
    assert (adamw.inside_the_sweep, onebit.inside_the_sweep) == (True, False)


def test_sentences_are_true_to_them() -> None:
    said = sentence("onebit-adam", find(SWEPT, RUNS, 2)["onebit-adam"])
    assert said.endswith("as accurate as AdamW under DDP (+0.20 points), 25x fewer bytes once frozen")
    worse = RUNS | {
        "onebit-adam": [outcome("onebit-adam", 0, 88.0, [0.0] * 6), outcome("onebit-adam", 1, 90.0, [0.0] * 6)]
    }
    assert sentence("onebit-adam", find(SWEPT, worse, 2)["onebit-adam"]).endswith(
        "2.0 points less accurate than AdamW under DDP"
    )


def test_a_run_that_never_freezes_has_no_frozen_bytes() -> None:
    assert frozen_bytes(RUNS["adamw"][0], 20) == 0.0
