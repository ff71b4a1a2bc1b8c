"""The convergence study in small: digits and two seeds, on ranks in threads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.common.errors import InputError
from experiments.convergence.__main__ import parse, study
from experiments.training.optimizers import PARENTS
from thinwire.comm import threads


def run(folder: Path, *arguments: str) -> None:
    options = parse(["--task", "digits", "--output", str(folder), *arguments])
    threads.run(lambda comm: study(comm, options), 2)


def digits_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "convergence.json").read_text())["tasks"]["digits"]
    return found


def test_it_writes_every_curve_and_the_picture(tmp_path: Path) -> None:
    ours = ["onebit-adam", "zero-one-adam"]
    run(tmp_path, "--seeds", "1", "--steps", "21", "--optimizer", *ours)
    assert (tmp_path / "convergence.png").read_bytes().startswith(b"\x89PNG")
    runs = digits_of(tmp_path)["runs"]
    assert runs.keys() == {*ours, *(PARENTS[name] for name in ours)}
    for (only,) in runs.values():
        assert only["curve"]["losses"][-1] < only["curve"]["losses"][0]
    assert runs["onebit-adam"][0]["frozen_at"] == 7, "stages are in proportion to the steps"


def test_findings_are_of_all_seeds(tmp_path: Path) -> None:
    run(tmp_path, "--seeds", "2", "--steps", "6", "--optimizer", "onebit-adam")
    digits = digits_of(tmp_path)
    for runs in digits["runs"].values():
        assert [run["seed"] for run in runs] == [0, 1]
    losses = [run["final_loss"] for run in digits["runs"]["adamw"]]
    assert losses[0] != losses[1]
    assert digits["findings"]["onebit-adam"]["exact_loss"] == pytest.approx(sum(losses) / 2)


def test_tuning_compares_learning_rates(tmp_path: Path) -> None:
    run(tmp_path, "--tune", "--steps", "3")
    tuned = json.loads((tmp_path / "convergence_tuning.json").read_text())
    assert all(len(tuned["final_loss_by_learning_rate"][optimizer]["digits"]) > 2 for optimizer in ("adamw", "lamb"))
    assert not (tmp_path / "convergence.png").exists()


def test_the_command_line_takes_tasks_and_seeds(tmp_path: Path) -> None:
    options = parse(["--task", "digits", "--seeds", "5", "--output", str(tmp_path)])
    assert options.task == ["digits"]
    assert options.seeds == 5
    assert set(options.optimizer) == {*PARENTS} - {"onebit-lion"}
    with pytest.raises(InputError, match="--seeds"):
        parse(["--seeds", "0", "--output", str(tmp_path)])
    with pytest.raises(InputError, match="absent"):
        parse(["--output", str(tmp_path), "--corpus", str(tmp_path / "absent")])
