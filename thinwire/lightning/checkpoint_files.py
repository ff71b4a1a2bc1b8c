"""The optimizers' part of a Lightning checkpoint: beside NAME.ckpt, in `thinwire/` of the same folder, a checkpoint of
its own for each optimizer, with one file a rank.

A new one is written under a new tag before NAME.ckpt, which names the tag, takes the place of an older NAME.ckpt; what
that one named goes last. Killed at any moment, NAME.ckpt names what is there.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.engine.checkpoint.folder import CheckpointFolder
from thinwire.engine.checkpoint.store import load_optimizer, save_optimizer
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

__all__ = ["CheckpointFiles"]

_FOLDER = "thinwire"
_TAG = "thinwire_tag"  # of an optimizer's entry in NAME.ckpt
_LONGEST_NAME = 150  # bytes of NAME in a tag
_PATIENCE = 60.0  # seconds for which another job may have the folder locked


class CheckpointFiles:
    """What belongs to the Lightning checkpoint at `path`.

    Raises ValueError for a path that is not one of a file system.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if "://" in str(path):
            raise ValueError(
                f"cannot save or load the optimizers' state at {path}: every rank has a file of its own, on a file "
                "system that all ranks have mounted; give a path there"
            )
        self._path = Path(path)
        self._folder = self._path.parent / _FOLDER
        name = self._path.name.encode()[:_LONGEST_NAME].decode(errors="ignore").lstrip(".")
        self._name = "".join(one if one.isprintable() and one != "\\" else "_" for one in name)

    def save(self, optimizers: Sequence[SynchronizedOptimizer], nonce: str) -> list[dict[str, Any]]:
        """Write every optimizer's state; what NAME.ckpt has to say of each. Collective.

        `nonce`: eight hexadecimal digits, the same on all ranks, that no other save uses. Raises CheckpointError, on
        every rank, where it could not be written.
        """
        entries = []
        for number, optimizer in enumerate(optimizers):
            tag = f"{self._name}.{nonce}.{number}"
            save_optimizer(optimizer, self._folder, tag)
            entries.append({_TAG: tag})
        return entries

    def remove(self, but: Sequence[str] = ()) -> None:
        """Remove what earlier saves of this name wrote, but for these nonces. By rank 0 alone."""
        stale = re.compile(rf"{re.escape(self._name)}\.([0-9a-f]{{8}})\.\d+")
        names = sorted(path.name for path in self._folder.iterdir()) if self._folder.is_dir() else []
        for name in names:
            found = stale.fullmatch(name)
            if found is None or found[1] in but:
                continue
            if problem := CheckpointFolder(self._folder).remove(name, _PATIENCE):
                warnings.warn(problem, RuntimeWarning, stacklevel=2)

    @staticmethod
    def has_state(entry: Any) -> bool:
        """Whether this entry of NAME.ckpt is one that `save` returned."""
        return isinstance(entry, dict) and _TAG in entry

    def load(self, optimizer: SynchronizedOptimizer, entry: Any) -> None:
        """Load the state that an entry stands for, on any number of ranks. Collective.

        Raises CheckpointError, on every rank, where it is missing or damaged, and ValueError where it is another
        optimizer's.
        """
        advice = (
            f"{self._path} goes with {self._folder}: copy both. The weights alone load with load_from_checkpoint(), to "
            "train from without ckpt_path"
        )
        load_optimizer(optimizer, self._folder, entry[_TAG], advice)
