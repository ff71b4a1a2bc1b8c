"""Files and folders as checkpoints need them, on a disk that others write to as well.

Only regular files of a bounded size are opened, so that a FIFO, a device or an endless file under a checkpoint's name
is an error, and neither a hang nor a process out of memory. What is written is on the disk before its name is there.
Clearing up goes as far as it goes: what cannot be removed is told and left for the next time. Pickles can run any
code when they are loaded: they are recognized, refused by name and never opened.
"""

from __future__ import annotations

import os
import shutil
import stat
import zipfile
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "ADVICE",
    "IMPORTABLE",
    "CheckpointError",
    "NotAFileError",
    "UsageError",
    "create_file",
    "find_pickle",
    "has_importable_files",
    "is_pickle",
    "open_file",
    "printable",
    "read_file",
    "remove",
    "sync_folder",
    "write_whole",
]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message names the file or parameter, what is wrong with it and what to do."""


class UsageError(Exception):
    """What the command line asked for is not there, or cannot be done; exit code 2."""


def printable(text: str) -> str:
    """`text` with everything but printable characters and line ends spelled out."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


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


def remove(path: Path) -> str | None:
    """Remove a file, a link, never what it leads to, or a folder with all in it; what is in the way, if anything."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return None
        shutil.rmtree(path, ignore_errors=True)  # all that can be removed
        if os.path.lexists(path):
            shutil.rmtree(path)  # again, for the reason
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path} cannot be removed: {error.strerror or error}"
    return None


ADVICE = (
    "a pickle, which can run any code when it is loaded, so thinwire never loads one: load it with the program that "
    "wrote it, write the weights with safetensors.torch.save_model, and load those into the model before training"
)

IMPORTABLE = "*rank_*_states.pt"
"""Names of files that `thinwire checkpoint import` reads."""

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


def has_importable_files(folder: Path) -> bool:
    """Whether files that `thinwire checkpoint import` reads lie in a folder or right below it."""
    try:
        return any(path.is_file() for path in [*folder.glob(IMPORTABLE), *folder.glob(f"*/{IMPORTABLE}")])
    except OSError:
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
