"""Small runs of stages and shardings, on ranks in threads."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from experiments.common.errors import InputError
from experiments.common.results import write_json
from experiments.stages.losses import Job, Run, parse, train_all
from tests.experiments.stages.given import write_job
from thinwire.comm import threads


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return write_job(tmp_path)


def train(job: Job, ranks: int, folder: Path) -> dict[str, Any]:
    """What `experiments.stages.losses` writes, with its ranks in threads."""
    asked, written = folder / "job.json", folder / f"losses-{ranks}.json"
    write_json(asked, asdict(job))
    options = parse(["--job", str(asked), "--output", str(written)])
    threads.run(lambda comm: train_all(comm, options), ranks)
    found: dict[str, Any] = json.loads(written.read_text())["losses"]
    return found


def test_stages_have_the_same_losses(job: Job, tmp_path: Path) -> None:
    runs = [Run(str(stage), "adamw", stage) for stage in range(3)]
    found = train(replace(job, runs=runs), 1, tmp_path)
    assert len(found["0"]["training"]) == 4
    assert found["0"]["training"] == found["1"]["training"] == found["2"]["training"]


@pytest.mark.parametrize(("optimizer", "tolerance"), [("adamw", 1e-5), ("onebit-adam", 0.05)])
def test_a_saved_run_goes_on_with_the_same_batches_on_other_ranks(
    job: Job, tmp_path: Path, optimizer: str, tolerance: float
) -> None:
    folder = str(tmp_path / "saved")
    saved = train(replace(job, runs=[Run("saved", optimizer, 1, save=folder, save_at=3)]), 2, tmp_path)["saved"]
    resumed = train(replace(job, runs=[Run("resumed", optimizer, 1, load=folder)]), 3, tmp_path)["resumed"]
    assert resumed["first_step"] == 3
    assert resumed["training"] == pytest.approx(saved["training"][3:], rel=tolerance)
    assert resumed["validation_steps"] == saved["validation_steps"]


def test_plain_and_sharded_1bit_adam_train(job: Job, tmp_path: Path) -> None:
    runs = [Run("plain", "onebit-adam", None), Run("half", "onebit-adam", 2, bf16=True)]
    found = train(replace(job, runs=runs), 1, tmp_path)
    assert found["plain"]["frozen_at"] == found["half"]["frozen_at"] == 2
    assert found["half"]["validation"][-1] == pytest.approx(found["plain"]["validation"][-1], rel=0.02)


def test_a_batch_that_cannot_be_shared_is_refused(job: Job, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="6 sequences cannot be shared among 4 ranks"):
        train(job, 4, tmp_path)
