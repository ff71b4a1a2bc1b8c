"""The study of stages: what it asks of its ranks, and what it writes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from experiments.common.results import write_json
from experiments.stages.__main__ import sharded_job, small_job, write_results
from experiments.stages.losses import Job
from tests.experiments.stages.given import sharded, small, write_job


def test_jobs_survive_their_file(tmp_path: Path) -> None:
    job = sharded_job(90, 2, None)
    assert [run.name for run in job.runs][:2] == ["unsharded, seed 0", "ZeRO-1, seed 0"]
    write_json(tmp_path / "job.json", asdict(job))
    assert Job.read(tmp_path / "job.json") == job


def test_only_ranks_that_resume_load() -> None:
    saving = small_job(4, 50, None, Path("there")).runs
    resuming = small_job(8, 50, None, Path("there")).runs
    assert [run.save_at for run in saving if run.save] == [30, 30]
    assert [run.load for run in resuming] == ["there/adamw", "there/onebit-adam"]


def test_numbers_and_picture_are_written(tmp_path: Path) -> None:
    runs = {ranks: {"losses": one} for ranks, one in small().items()}
    write_results(tmp_path, runs, write_job(tmp_path), {"unigram_entropy": 1.5, "losses": sharded()})
    assert (tmp_path / "stages.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "stages.json").read_text())
    assert written["finding"]["final_difference"] == {"ZeRO-1": 0, "ZeRO-2": 0}
    assert str(tmp_path) not in json.dumps(written)
