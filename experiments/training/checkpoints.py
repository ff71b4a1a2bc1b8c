"""The checkpoints of one run: the engine's own, beside what the experiment needs to know about the run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from experiments.common.errors import InputError, on_every_rank
from experiments.training.learners import EngineLearner
from experiments.training.trainer import Trainer
from thinwire.comm import Communicator
from thinwire.engine import CheckpointError

__all__ = ["RunCheckpoints"]


class RunCheckpoints:
    """The checkpoints of one run, on a file system that all ranks share. Every method is collective."""

    def __init__(self, folder: Path, comm: Communicator, settings: dict[str, Any]) -> None:
        """Takes the folder, and the settings that a run must share with the checkpoint it continues."""
        self._folder = folder
        self._comm = comm
        self._settings = settings

    def save(self, trainer: Trainer, learner: EngineLearner) -> None:
        """Writes a checkpoint; where the disk is full, the engine warns and keeps the earlier ones."""
        state = {"settings": self._settings, "progress": trainer.progress()}
        learner.engine.save_checkpoint(self._folder, f"step-{trainer.step:08d}", state)

    def load(self, trainer: Trainer, learner: EngineLearner) -> bool:
        """Takes the newest whole checkpoint up, if there is one, and says whether there was.

        Raises:
            InputError: on every rank, if the checkpoint is of a run with other settings.
        """
        try:
            path, state = learner.engine.load_checkpoint(self._folder)
        except (CheckpointError, ValueError, KeyError) as error:
            raise InputError(f"--resume cannot continue the run in {self._folder}: {error}") from error
        if path is None:
            return False
        self._check(Path(path).name, state["settings"])
        trainer.restore_progress(state["progress"])
        return True

    def clear(self) -> None:
        """Removes the checkpoints of an earlier run."""
        on_every_rank(self._comm, self._remove if self._comm.rank == 0 else lambda: None)

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _check(self, name: str, theirs: dict[str, Any]) -> None:
        ours = self._settings
        different = [
            f"{key} was {theirs.get(key)!r} and is now {ours.get(key)!r}"
            for key in sorted(ours.keys() | theirs.keys())
            if ours.get(key) != theirs.get(key)
        ]
        if different:
            raise InputError(
                f"--resume cannot continue {name}: {'; '.join(different)}. "
                "Give the same settings, or leave --resume out to start anew"
            )
