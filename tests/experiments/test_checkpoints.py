"""Checkpoints: training goes on bit for bit, nothing is half written, foreign ones are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.checkpoints import CheckpointFolder
from experiments.errors import InputError
from experiments.training import OPTIMIZERS, Trainer
from tests.experiments.helpers import PLAN, LineTask
from thinwire.comm import Communicator, threads

SETTINGS = {"model": "line", "steps": PLAN.steps}


def train(comm: Communicator, optimizer: str, folder: Path, until: int, *, resume: bool = False) -> Trainer:
    """Trains to a step and saves there, on a folder that all ranks share."""
    trainer = Trainer(LineTask(), PLAN, optimizer, comm)
    checkpoints = CheckpointFolder(folder, comm, SETTINGS)
    assert checkpoints.load(trainer) is resume
    while trainer.step < until:
        trainer.advance()
    checkpoints.save(trainer)
    return trainer


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stop", [2, 3, 7])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, optimizer: str, stop: int) -> None:
    whole = threads.run(lambda comm: train(comm, optimizer, tmp_path / "whole", PLAN.steps), 2)
    threads.run(lambda comm: train(comm, optimizer, tmp_path / "parts", stop), 2)
    resumed = threads.run(lambda comm: train(comm, optimizer, tmp_path / "parts", PLAN.steps, resume=True), 2)
    for one, other in zip(whole, resumed, strict=True):
        assert one.curve == other.curve
        assert one.bytes_sent == other.bytes_sent
        assert one.outcome.frozen_at == other.outcome.frozen_at
        pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_the_newest_two_are_kept_and_leftovers_are_not_checkpoints(tmp_path: Path) -> None:
    def work(comm: Communicator) -> None:
        trainer = Trainer(LineTask(), PLAN, "adamw", comm)
        checkpoints = CheckpointFolder(tmp_path, comm, SETTINGS)
        for _ in range(4):
            trainer.advance()
            checkpoints.save(trainer)

    threads.run(work, 2)
    (tmp_path / ".step-00000009.partial").mkdir()
    names = sorted(path.name for path in tmp_path.glob("[!.]*"))
    assert names == ["step-00000003", "step-00000004"]
    assert threads.run(lambda comm: train(comm, "adamw", tmp_path, 4, resume=True).step, 2) == [4, 4]
    assert {path.name for path in (tmp_path / "step-00000004").iterdir()} == {
        "model.safetensors",
        "optimizer-rank0.pt",
        "optimizer-rank1.pt",
        "run.json",
    }


@pytest.mark.parametrize(
    ("settings", "ranks", "complaint"), [({"steps": 99}, 2, "steps was 12"), ({}, 1, "ranks was 2")]
)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, settings: dict[str, object], ranks: int, complaint: str
) -> None:
    threads.run(lambda comm: train(comm, "adamw", tmp_path, 2), 2)

    def work(comm: Communicator) -> None:
        folder = CheckpointFolder(tmp_path, comm, {**SETTINGS, **settings})
        with pytest.raises(InputError, match=complaint):
            folder.load(Trainer(LineTask(), PLAN, "adamw", comm))

    threads.run(work, ranks)


def test_clearing_starts_anew(tmp_path: Path) -> None:
    def work(comm: Communicator) -> bool:
        folder = CheckpointFolder(tmp_path / "run", comm, SETTINGS)
        folder.clear()
        trainer = Trainer(LineTask(), replace(PLAN, seed=1), "adamw", comm)
        return folder.load(trainer)

    threads.run(lambda comm: train(comm, "adamw", tmp_path / "run", 2), 2)
    assert threads.run(work, 2) == [False, False]


def test_a_write_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    def work(comm: Communicator) -> None:
        trainer = Trainer(LineTask(), PLAN, "adamw", comm)
        folder = CheckpointFolder(tmp_path / "run", comm, SETTINGS)
        folder.save(trainer)
        if comm.rank == 1:
            folder._optimizer_file = lambda: "no/such/folder.pt"  # type: ignore[method-assign]
        trainer.advance()
        with pytest.raises(InputError, match="rank 1"):
            folder.save(trainer)

    threads.run(work, 2)
    assert [path.name for path in tmp_path.glob("run/[!.]*")] == ["step-00000000"]
