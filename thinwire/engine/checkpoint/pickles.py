"""Tells pickles apart: loading one can run any code, so a checkpoint made of them is refused by name, never opened."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import BinaryIO

from thinwire.engine.checkpoint.regular_files import open_file

__all__ = ["ADVICE", "find_pickle", "is_pickle"]

ADVICE = (
    "a pickle, which can run any code when it is loaded, so thinwire never loads one: load it with the program that "
    "wrote it, write the weights with safetensors.torch.save_model, and load those into the model before training"
)

_SUFFIXES = {".pt", ".pth", ".pkl", ".pickle", ".ckpt"}


def is_pickle(path: Path) -> bool:
    """Whether a file is one, by its name or by its content."""
    if path.suffix.lower() in _SUFFIXES:
        return True
    try:
        with os.fdopen(open_file(path), "rb") as file:
            return _is_protocol_header(file.read(9)) or _is_torch_archive(file)
    except (OSError, zipfile.BadZipFile):
        return False


def find_pickle(folder: Path) -> Path | None:
    """The first pickle in a folder or right below it."""
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        if path.is_file() and is_pickle(path):
            return path
    return None


def _is_protocol_header(head: bytes) -> bool:
    # A safetensors file can start with the same bytes: its header's length, eight of them. Then comes a brace.
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5 and head[8:] != b"{"


def _is_torch_archive(file: BinaryIO) -> bool:
    """Whether torch.save wrote it: a zip file with a pickle in it."""
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return any(name.endswith(".pkl") for name in archive.namelist())
