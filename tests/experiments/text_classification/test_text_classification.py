"""The classification study in small: a whole run on one rank, and what its command line refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.text_classification.__main__ import parse, study
from experiments.text_classification.findings import find
from experiments.text_classification.learning import Outcome
from experiments.training import sweep
from tests.experiments.helpers import write_text
from thinwire.comm.threads import single


def test_a_run_writes_numbers_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shopping = write_text(tmp_path / "shopping.txt", 40)
    counting = tmp_path / "counting.txt"
    counting.write_text("".join(f"{number} and {number + 1} are {2 * number + 1}\n" for number in range(60)))
    monkeypatch.setattr(sweep, "_MOST_BEYOND", 0)
    short = ["--rates", "1e-3", "2e-3", "--steps", "5", "--seeds", "2", "--model", "tiny", "--batch-size", "4"]
    short += ["--length", "5", "--vocab-size", "200"]
    options = parse(["--corpus", str(shopping), str(counting), *short, "--output", str(tmp_path)])
    study(single(60.0), options)
    assert (tmp_path / "text_classification.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "text_classification.json").read_text())
    assert str(tmp_path) not in json.dumps(found)
    assert found["settings"]["classes"] == ["shopping", "counting"]
    assert found["resumes_bit_for_bit"] == {"onebit-adam": True}
    assert list(found["methods"]) == ["adamw", "onebit-adam"]
    for one in found["methods"].values():
        assert [run["seed"] for run in one["runs"]] == [0, 1]
        errors = one["validation_error_by_learning_rate"]
        assert min(errors.values()) == errors[f"{one['learning_rate']:g}"] == 100 - one["runs"][0]["validation"]
        assert one["test"] == pytest.approx(sum(run["test"] for run in one["runs"]) / 2)
    assert found["findings"][0] in capsys.readouterr().out


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
