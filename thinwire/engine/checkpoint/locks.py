"""Keeps jobs that share a folder of checkpoints out of each other's way: one at a time changes what is published, and a
save in flight says whose it is, so that no job takes it for what a killed one has left behind.

Both stand on `flock`, which ends with the process that holds it, however that ends. Between hosts it works on local
disks, NFS from Linux 2.6.12 on, and parallel file systems that are mounted with it. Where it does not work, or only
inside a host, saves of a live job are told by their writer's process, and on other hosts by being written to: two jobs
that publish at once are then not kept apart.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from thinwire.engine.checkpoint.files import NotAFileError, create_file, open_file, read_file

__all__ = ["LOCK", "OWNER", "Claim", "FolderLock", "is_abandoned", "lock_folder"]

LOCK = ".lock"
OWNER = "owner.json"

_POLL_SECONDS = 0.005
_SLOWEST_POLL_SECONDS = 0.1
_LONGEST_OWNER = 4096
_SECONDS_BETWEEN_HEARTBEATS = 60.0
# A save that no file of has been written to for so long is dead, whatever host it was of.
_QUIET_SECONDS = 3600.0


@dataclass(frozen=True)
class FolderLock:
    """`problem`: why other jobs may change the folder all the same; None where they cannot. `now`: by the file system's
    clock, which may not be this host's."""

    problem: str | None
    now: float

    @property
    def exclusive(self) -> bool:
        """Whether no other job changes the folder."""
        return self.problem is None


@contextmanager
def lock_folder(folder: Path, seconds: float) -> Iterator[FolderLock]:
    """Have `folder` for oneself. Raises TimeoutError where another has it for more than `seconds`."""
    try:
        descriptor = _open_lock(folder / LOCK)
    except OSError as error:
        yield FolderLock(_unlockable(folder, error.strerror or str(error)), time.time())
        return
    try:
        works = _wait_for_lock(descriptor, folder, seconds)
        with suppress(OSError):
            os.utime(descriptor)
        problem = None if works else _unlockable(folder, "its file system has no locks")
        yield FolderLock(problem, os.fstat(descriptor).st_mtime)
    finally:
        _unlock(descriptor)


class Claim:
    """The mark in the folder of a save that a live job is writing it, from its making to `release`. Raises OSError."""

    def __init__(self, partial: Path) -> None:
        self._path = partial / OWNER
        self._descriptor: int | None = create_file(self._path)
        self._beaten = time.monotonic()
        locked = _try_lock(self._descriptor, fcntl.LOCK_EX) is True
        try:
            os.write(self._descriptor, json.dumps({**_this_process(), "locked": locked}).encode())
        except OSError:
            self.release()
            raise

    def beat(self) -> None:
        """Say, now and then, that the job lives on: for hosts that see no locks."""
        now = time.monotonic()
        if self._descriptor is not None and now - self._beaten >= _SECONDS_BETWEEN_HEARTBEATS:
            self._beaten = now
            with suppress(OSError):
                os.utime(self._descriptor)

    def release(self) -> None:
        """Take the mark away."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                self._path.unlink()
            _unlock(descriptor)


def is_abandoned(partial: Path, lock: FolderLock) -> bool:
    """Whether no process writes the save in the folder `partial` any more."""
    try:
        descriptor = open_file(partial / OWNER)
    except OSError:
        descriptor = None
    owner = _owner(partial)
    if descriptor is None or owner is None:
        # A save gets its mark, and loses it, while its job has the folder's lock.
        return lock.exclusive or is_quiet(partial, lock.now)
    try:
        free = _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        _unlock(descriptor)
    if free is False:
        return False
    if (owner.get("host"), owner.get("boot")) == (socket.gethostname(), _boot()):
        return (free is True and owner.get("locked") is True) or not _is_alive(owner)
    return is_quiet(partial, lock.now)


def is_quiet(path: Path, now: float) -> bool:
    """Whether nothing in the folder `path`, or the file, was written to for long."""
    try:
        entries = [path, *path.iterdir()] if path.is_dir() and not path.is_symlink() else [path]
        return max(one.lstat().st_mtime for one in entries) < now - _QUIET_SECONDS
    except OSError:
        return False


def _owner(partial: Path) -> dict[str, object] | None:
    """What the mark of a save says; None where there is none, or half of one."""
    try:
        owner = json.loads(read_file(partial / OWNER, _LONGEST_OWNER))
    except (OSError, ValueError, RecursionError):
        return None
    return owner if isinstance(owner, dict) else None


def _open_lock(path: Path) -> int:
    """A descriptor to lock by. Raises OSError, for what is no file too."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(f"{path} is not a file")
    return descriptor


def _unlockable(folder: Path, why: str) -> str:
    return f"{folder / LOCK} cannot be locked, {why}: let no two jobs save to this folder at a time"


def _wait_for_lock(descriptor: int, folder: Path, seconds: float) -> bool:
    """Whether it is held now; False where this file system has no locks."""
    deadline, pause = time.monotonic() + seconds, _POLL_SECONDS
    while (locked := _try_lock(descriptor, fcntl.LOCK_EX)) is False:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"another process has held {folder / LOCK} for more than {seconds:g} s: see whether a job that saves "
                "to the same folder hangs"
            )
        time.sleep(pause)
        pause = min(2 * pause, _SLOWEST_POLL_SECONDS)
    return locked is True


def _try_lock(descriptor: int, kind: int) -> bool | None:
    """Whether the file is locked now; None where this file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _unlock(descriptor: int) -> None:
    # Closing is not enough: a child that was forked meanwhile has the same lock.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _this_process() -> dict[str, str | int | None]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": _boot(), "pid": pid, "started": _start_of(pid)}


def _is_alive(owner: dict[str, object]) -> bool:
    """Whether the process lives: not another that was given its number since, where the system says when it began."""
    pid = owner.get("pid")
    if type(pid) is not int or not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is another user's
    return _start_of(pid) == owner.get("started")


def _boot() -> str | None:
    """What tells one start of the operating system from another."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _start_of(pid: int) -> str | None:
    """When a process began, in the system's own count."""
    try:
        # The second field is the program's name, in parentheses, and may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
