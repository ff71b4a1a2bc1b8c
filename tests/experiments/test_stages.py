"""Small runs of stages and shardings on ranks in threads, what is found in their losses, and what is written."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from experiments.common.results import write_json
from experiments.stages.__main__ import small_job, write_results
from experiments.stages.findings import EXACT_ON, RESUME_ON, RESUMED, find
from experiments.stages.losses import Job, Run, parse, train_all
from tests.experiments.helpers import written
from thinwire.comm import threads


def losses(training: list[float], first_step: int = 0, final: float = 1.0) -> dict[str, Any]:
    return {"first_step": first_step, "training": training, "validation": [2.0, final], "validation_steps": [1, 2]}


def small() -> dict[int, dict[str, Any]]:
    """Losses of every small run, all alike."""
    found: dict[int, dict[str, Any]] = {ranks: {} for ranks in (1, 2, 3, 4, 8)}
    for ranks in EXACT_ON:
        found[ranks] = {f"adamw, stage {stage}": losses([4.0, 2.0]) for stage in range(4)}
    for optimizer in RESUMED:
        found[4][f"{optimizer}, saved"] = losses([4.0, 2.0])
        for ranks in RESUME_ON:
            found[ranks][f"{optimizer}, resumed"] = losses([2.0], first_step=1)
    return found


def sharded(zero_1: float = 1.0) -> dict[str, Any]:
    finals = {"unsharded": 1.0, "ZeRO-1": zero_1, "ZeRO-2": 1.0}
    return {
        f"{system}, seed {seed}": losses([1.0], final=final + seed / 10)
        for system, final in finals.items()
        for seed in (0, 1)
    }


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job of four steps on a little text."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {line} has {line % 7} words and {line % 11} more\n" for line in range(3000)))
    return replace(small_job(4, 4, [text], tmp_path), batch=6, vocabulary=80, freeze_step=2)


def train(job: Job, ranks: int, folder: Path) -> dict[str, Any]:
    """What `experiments.stages.losses` writes, with its ranks in threads."""
    asked, output = folder / "job.json", folder / f"losses-{ranks}.json"
    write_json(asked, asdict(job))
    options = parse(["--job", str(asked), "--output", str(output)])
    threads.run(lambda comm: train_all(comm, options), ranks)
    found: dict[str, Any] = json.loads(output.read_text())["losses"]
    return found


@pytest.mark.parametrize(("optimizer", "tolerance"), [("adamw", 1e-5), ("onebit-adam", 0.05)])
def test_a_saved_run_goes_on_with_the_same_batches_on_other_ranks(job, tmp_path, optimizer, tolerance) -> None:
    folder = str(tmp_path / "saved")
    saved = train(replace(job, runs=[Run("saved", optimizer, 1, save=folder, save_at=3)]), 2, tmp_path)["saved"]
    resumed = train(replace(job, runs=[Run("resumed", optimizer, 1, load=folder)]), 3, tmp_path)["resumed"]
    assert resumed["first_step"] == 3
    assert resumed["training"] == pytest.approx(saved["training"][3:], rel=tolerance)
    assert resumed["validation_steps"] == saved["validation_steps"]


def test_a_difference_anywhere_is_found() -> None:
    runs = small()
    runs[3]["adamw, stage 2"]["training"][0] *= 1 + 1e-3
    runs[8]["onebit-adam, resumed"]["training"][0] *= 0.98
    found = find(runs, sharded(zero_1=1.1))
    assert found.stages["3"]["2"] == pytest.approx(1e-3)
    assert found.stages["3"]["1"] == 0
    assert found.resumed["onebit-adam"]["8"] == pytest.approx(0.02)
    assert found.final_difference["ZeRO-1"] == pytest.approx(0.1 / 1.05)
    assert "2.00%" in found.sentences[2]


def test_numbers_and_picture_are_written(job: Job, tmp_path: Path) -> None:
    runs = {ranks: {"losses": one} for ranks, one in small().items()}
    write_results(tmp_path, runs, job, {"unigram_entropy": 1.5, "losses": sharded()})
    found = written(tmp_path, "stages")
    assert found["finding"]["final_difference"] == {"ZeRO-1": 0, "ZeRO-2": 0}
