"""Checkpoints of a training run: whole or absent, every rank's own optimizer state included.

A checkpoint is a folder that gets its name only when all ranks have written their files into it.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from experiments.errors import InputError, on_every_rank
from experiments.results import write_json
from experiments.training import Trainer
from thinwire.comm import Communicator

__all__ = ["CheckpointFolder"]

_KEPT = 2


class CheckpointFolder:
    """The checkpoints of one run, newest last; on a file system that all ranks share."""

    def __init__(self, folder: Path, comm: Communicator, settings: dict[str, Any]) -> None:
        """Takes the folder, and the settings that a run must share with the checkpoint it continues."""
        self.folder = folder
        self.comm = comm
        self.settings = settings

    def save(self, trainer: Trainer) -> None:
        """Writes a checkpoint, then drops all but the newest two. All ranks call together.

        Raises:
            InputError: on every rank, if any rank could not write; earlier checkpoints stay.
        """
        whole = self.folder / f"step-{trainer.step:08d}"
        partial = self.folder / f".{whole.name}.partial"
        self._on_rank_0(lambda: _make_empty(partial))
        on_every_rank(self.comm, lambda: self._write(partial, trainer))
        self._on_rank_0(lambda: self._publish(partial, whole))

    def load(self, trainer: Trainer) -> bool:
        """Takes the newest checkpoint up, if there is one, and says whether there was.

        Raises:
            InputError: on every rank, if the checkpoint is of a run with other settings or ranks.
        """
        found = on_every_rank(self.comm, self._newest)
        if found is None:
            return False
        on_every_rank(self.comm, lambda: self._read(found, trainer))
        return True

    def clear(self) -> None:
        """Removes the checkpoints of an earlier run."""
        self._on_rank_0(lambda: shutil.rmtree(self.folder, ignore_errors=True))

    def _on_rank_0(self, action: Any) -> None:
        on_every_rank(self.comm, action if self.comm.rank == 0 else lambda: None)

    def _write(self, folder: Path, trainer: Trainer) -> None:
        # Given a path instead of a file, torch would report a full disk as a RuntimeError.
        with (folder / self._optimizer_file()).open("wb") as file:
            torch.save(trainer.optimizer.state_dict(), file)
        if self.comm.rank == 0:
            _save_weights(trainer.model, folder / "model.safetensors")
            write_json(
                folder / "run.json",
                {"settings": self.settings, "ranks": self.comm.size, "progress": trainer.progress()},
            )

    def _read(self, folder: Path, trainer: Trainer) -> None:
        run = json.loads((folder / "run.json").read_text())
        ours = {**self.settings, "ranks": self.comm.size}
        theirs = {**run["settings"], "ranks": run["ranks"]}
        different = [
            f"{name} was {theirs.get(name)!r} and is now {ours.get(name)!r}"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]
        if different:
            raise InputError(
                f"--resume cannot continue {folder.name}: {'; '.join(different)}. "
                "Give the same settings, or leave --resume out to start anew"
            )
        load_model(trainer.model, folder / "model.safetensors")
        state = torch.load(folder / self._optimizer_file(), weights_only=True)
        trainer.optimizer.load_state_dict(state)
        trainer.restore_progress(run["progress"])

    def _optimizer_file(self) -> str:
        return f"optimizer-rank{self.comm.rank}.pt"

    def _publish(self, partial: Path, whole: Path) -> None:
        for file in partial.iterdir():
            _flush(file)
        _flush(partial)
        if whole.exists():
            shutil.rmtree(whole)
        partial.rename(whole)
        _flush(self.folder)
        for old in self._all()[:-_KEPT]:
            shutil.rmtree(old)

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))

    def _newest(self) -> Path | None:
        return self._all()[-1] if self._all() else None


def _save_weights(model: nn.Module, path: Path) -> None:
    try:
        save_model(model, str(path))
    except SafetensorError as error:
        raise OSError(f"the weights could not be written: {error}") from error


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _flush(path: Path) -> None:
    """Has the file, or the folder's list of names, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
