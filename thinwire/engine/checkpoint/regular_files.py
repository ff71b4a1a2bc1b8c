"""Opens files that anybody may have put there: only regular ones, of a bounded size, so that a FIFO, a device or an
endless file under a checkpoint's name is an error, and neither a hang nor a process out of memory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["NotAFileError", "create_file", "open_file", "read_file"]


class NotAFileError(OSError):
    """What has the name of a file is something else: a folder, a FIFO, a device, a socket."""


def open_file(path: str | Path, folder: int | None = None) -> int:
    """A descriptor to read a regular file by, `path` being relative to the descriptor `folder` where that is given.

    Links are followed: what they lead to is checked as everything is. Raises OSError, NotAFileError included.
    """
    # Looked at before, since opening a device can do something, and after, since it may have been exchanged.
    _check(os.stat(path, dir_fd=folder), path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        _check(os.fstat(descriptor), path)
    except NotAFileError:
        os.close(descriptor)
        raise
    return descriptor


def read_file(path: str | Path, most_bytes: int, folder: int | None = None) -> bytes:
    """The content of a regular file of at most `most_bytes`. Raises OSError, for a longer one too."""
    descriptor = open_file(path, folder)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(f"it is longer than the {most_bytes:,} bytes that it can have")
    return content


def create_file(path: Path) -> int:
    """A descriptor to write a new file by; what is there already, a link too, is never written to. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _check(found: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise NotAFileError(f"{os.fspath(path)} is not a file")
