"""Checkpoints of a run: training goes on bit for bit, foreign ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.common.errors import InputError
from experiments.training.checkpoints import RunCheckpoints
from experiments.training.learners import EngineLearner
from experiments.training.optimizers import ENGINE
from experiments.training.trainer import Trainer
from tests.experiments.helpers import PLAN, LineTask, engine_config
from thinwire.comm import Communicator, threads

SETTINGS = {"model": "line", "steps": PLAN.steps}


def start(comm: Communicator, optimizer: str, stage: int = 1) -> tuple[Trainer, EngineLearner]:
    task = LineTask()
    learner = EngineLearner(task.build_model(PLAN.seed), PLAN, engine_config(optimizer, stage), comm)
    return Trainer(task, PLAN, learner, comm), learner


def train(
    comm: Communicator, optimizer: str, folder: Path, until: int, *, stage: int = 1, resume: bool = False
) -> tuple[Trainer, list[torch.Tensor]]:
    """Trains to a step and saves there, on a folder that all ranks share."""
    trainer, learner = start(comm, optimizer, stage)
    checkpoints = RunCheckpoints(folder, comm, SETTINGS)
    assert checkpoints.load(trainer, learner) is resume
    while trainer.step < until:
        trainer.advance()
    checkpoints.save(trainer, learner)
    return trainer, [parameter.detach().clone() for parameter in learner.module.parameters()]


@pytest.mark.parametrize("optimizer", ENGINE)
@pytest.mark.parametrize("stop", [2, 3, 7])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, optimizer: str, stop: int) -> None:
    whole = threads.run(lambda comm: train(comm, optimizer, tmp_path / "whole", PLAN.steps), 2)
    threads.run(lambda comm: train(comm, optimizer, tmp_path / "parts", stop), 2)
    resumed = threads.run(lambda comm: train(comm, optimizer, tmp_path / "parts", PLAN.steps, resume=True), 2)
    for (one, mine), (other, theirs) in zip(whole, resumed, strict=True):
        assert one.curve == other.curve
        assert one.bytes_sent == other.bytes_sent
        assert one.outcome.frozen_at == other.outcome.frozen_at
        assert all(map(torch.equal, mine, theirs))


def test_a_run_goes_on_at_another_stage_and_on_other_ranks(tmp_path: Path) -> None:
    threads.run(lambda comm: train(comm, "adamw", tmp_path, 5, stage=2), 2)
    trainer, _ = threads.run(lambda comm: train(comm, "adamw", tmp_path, PLAN.steps, stage=0, resume=True), 3)[0]
    assert trainer.curve.steps == [2, 4, 6, 8, 10, 12]


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    threads.run(lambda comm: train(comm, "adamw", tmp_path, 2), 2)

    def work(comm: Communicator) -> None:
        checkpoints = RunCheckpoints(tmp_path, comm, {**SETTINGS, "steps": 99})
        with pytest.raises(InputError, match="steps was 12 and is now 99"):
            checkpoints.load(*start(comm, "adamw"))

    threads.run(work, 2)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    threads.run(lambda comm: train(comm, "adamw", tmp_path, 2), 2)

    def work(comm: Communicator) -> None:
        with pytest.raises(InputError, match="--resume cannot continue"):
            RunCheckpoints(tmp_path, comm, SETTINGS).load(*start(comm, "onebit-adam"))

    threads.run(work, 2)


def test_clearing_starts_anew(tmp_path: Path) -> None:
    def work(comm: Communicator) -> Any:
        checkpoints = RunCheckpoints(tmp_path / "run", comm, SETTINGS)
        checkpoints.clear()
        return checkpoints.load(*start(comm, "adamw"))

    threads.run(lambda comm: train(comm, "adamw", tmp_path / "run", 2), 2)
    assert threads.run(work, 2) == [False, False]
