"""Files that are on the disk once written: a name that other processes can see stands for content that a loss of power
cannot take back."""

from __future__ import annotations

import os
from pathlib import Path

from thinwire.engine.checkpoint.regular_files import create_file

__all__ = ["sync_folder", "write_whole"]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file through a temporary name beside it, so that `path` holds all of `content` or what it held before.

    Raises OSError.
    """
    temporary = path.with_name(f"{path.name}.unfinished")
    temporary.unlink(missing_ok=True)  # of a process that was killed, or a link that leads elsewhere
    with os.fdopen(create_file(temporary), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync_folder(path: Path) -> None:
    """Have the folder's list of names reach the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
