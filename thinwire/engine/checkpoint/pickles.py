"""Pickles, which can run any code when they are loaded: recognized, refused by name and never opened, wherever they are
offered as checkpoints."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from thinwire.engine.checkpoint.files import open_file
from thinwire.engine.errors import CheckpointError

_ADVICE = (
    "a pickle, which can run any code when it is loaded, so thinwire never loads one: load it with the program that "
    "wrote it, write the weights with safetensors.torch.save_model, and load those into the model before training"
)
_IMPORTABLE = "*rank_*_states.pt"  # what `thinwire checkpoint import` reads
_SUFFIXES = {".pt", ".pth", ".pkl", ".pickle", ".ckpt"}


def is_pickle(path: Path) -> bool:
    """Whether a file is one, by its name or by its content."""
    if path.suffix.lower() in _SUFFIXES:
        return True
    try:
        with os.fdopen(open_file(path), "rb") as file:
            head = file.read(9)
            # A safetensors file can start with the same bytes: its header's length, eight of them. Then comes a brace.
            if len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5 and head[8:] != b"{":
                return True
            if not zipfile.is_zipfile(file):
                return False
            with zipfile.ZipFile(file) as archive:
                return any(name.endswith(".pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def refuse_pickles(folder: Path) -> None:
    """Raise CheckpointError if what is offered as a folder of checkpoints, and holds none, is made of pickles."""
    if folder.is_file():
        what = _ADVICE if is_pickle(folder) else "a file: give the folder that holds the checkpoints"
        raise CheckpointError(f"{folder} is no folder of checkpoints but {what}")
    _refuse_content(folder, "holds no thinwire checkpoint")


def refuse_pickle(path: Path) -> None:
    """Raise CheckpointError if what lies under a tag, and is no checkpoint, is a pickle or made of them."""
    if path.is_file() and is_pickle(path):
        raise CheckpointError(f"{path} is no checkpoint but {_ADVICE}")
    _refuse_content(path, "is no thinwire checkpoint")


def _refuse_content(folder: Path, what: str) -> None:
    """Look at the files in a folder and right below it."""
    try:
        found = [*folder.glob(_IMPORTABLE), *folder.glob(f"*/{_IMPORTABLE}")]
        importable = next((path for path in found if path.is_file()), None)
    except OSError:
        importable = None
    if importable:
        one = importable.parent == folder
        command = f"{folder.absolute().parent} --tag {folder.name}" if one else f"{folder}"
        raise CheckpointError(
            f"{folder} is another library's, made of pickles: turn it into a checkpoint of thinwire's with "
            f"`thinwire checkpoint import {command}`, and load that"
        )
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        if path.is_file() and is_pickle(path):
            raise CheckpointError(f"{folder} {what}: {path} is {_ADVICE}")
