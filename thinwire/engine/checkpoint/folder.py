"""The folder in which jobs keep their checkpoints: how one appears there whole or not at all, whatever is killed when,
and how jobs that share it keep out of each other's way.

One job at a time changes what is published, and a save in flight is marked as its job's, so that no other takes it for
what a killed one has left behind. Both stand on `flock`, which ends with the process that holds it, however that ends.
Between hosts it works on local disks, NFS from Linux 2.6.12 on, and parallel file systems that are mounted with it.
Where it does not work, or only inside a host, saves of a live job are told by their writer's process, and on other
hosts by being written to: two jobs that publish at once are then not kept apart.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.engine.checkpoint.files import (
    NotAFileError,
    create_file,
    open_file,
    read_file,
    remove,
    sync_folder,
    write_whole,
)
from thinwire.engine.checkpoint.manifest import (
    HIDDEN,
    LATEST,
    RANK_FILE,
    Candidate,
    RankFile,
    Run,
    find_candidates,
    looks_like_checkpoint,
)

LOCK = ".lock"
_OWNER = "owner.json"


class CheckpointFolder:
    """`path`/latest, `path`/TAG/ for each checkpoint, and names with a leading dot for what is not one (yet).

    Only rank 0 of a job changes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def hidden(self, tag: str, nonce: str, state: str = "partial") -> Path:
        """Where the files of a save lie while they are written, or one that it replaces until it is removed."""
        return self.path / f".{tag}.{nonce}.{state}"

    def check_free(self, tag: str) -> None:
        """Raise ValueError where a checkpoint of this tag would replace something that is none."""
        path = self.path / tag
        if os.path.exists(self.path) and not os.path.isdir(self.path):  # unlike Path's, these raise no OSError
            raise ValueError(f"{self.path} is not a folder: give one in which checkpoints can be kept")
        if os.path.lexists(path) and not looks_like_checkpoint(path):
            raise ValueError(f"{path} exists and is no checkpoint: give another tag, or move it away")

    def prepare(self, tag: str, nonce: str, seconds: float) -> tuple[Claim, list[str]]:
        """Make the folder of a save, and clear up behind saves that were killed; what could not be cleared up.

        Raises OSError, TimeoutError where another job has the folder locked for more than `seconds`.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with lock_folder(self.path, seconds) as lock:
            problems = [*([lock.problem] if lock.problem else ()), *self._clear_up(lock)]
            partial = self.hidden(tag, nonce)
            partial.mkdir()
            try:
                return Claim(partial), problems
            except OSError:
                remove(partial)
                raise

    def publish(self, tag: str, nonce: str, latest: bool = True) -> None:
        """Give a save, complete in its hidden folder, its name, then name it in `latest` if asked to. Raises OSError.

        A checkpoint of the same tag is moved aside, for `prune` to remove; a load finds it where it was moved to. The
        folder must be locked.
        """
        partial, whole, replaced = self.hidden(tag, nonce), self.path / tag, self.hidden(tag, nonce, "replaced")
        sync_folder(partial)
        # Whatever needs space comes first: from here on there are only renames.
        pointer = self.hidden(LATEST, nonce)
        if latest:
            write_whole(pointer, f"{tag}\n".encode())
        if os.path.lexists(whole):
            os.rename(whole, replaced)
        try:
            os.rename(partial, whole)
        except OSError:
            if os.path.lexists(replaced):
                os.rename(replaced, whole)
            raise
        sync_folder(self.path)
        if latest:
            os.replace(pointer, self.path / LATEST)
            sync_folder(self.path)

    def discard(self, tag: str, nonce: str) -> None:
        """Remove what a failed save has left, as far as it lets itself be removed."""
        for name, state in ((LATEST, "partial"), (LATEST, "partial.unfinished"), (tag, "partial")):
            remove(self.hidden(name, nonce, state))

    def prune(self, tag: str, nonce: str, keep: int | None, run: Run) -> tuple[list[str], list[str]]:
        """Remove what the save `tag` has replaced and, of what `run` wrote, what is older than the newest `keep` whole
        ones; all stay where `keep` is None. Returns the tags of those removed, and what could not be done.

        The folder must be locked.
        """
        problem = remove(self.hidden(tag, nonce, "replaced"))
        removed, problems, complete = [], [problem] if problem else [], 0
        for one in find_candidates(self.path) if keep is not None else ():
            # A checkpoint that a user has copied or renamed is theirs to remove, as another job's is.
            if one.manifest is None or one.manifest.tag != one.tag or not run.wrote(one.manifest):
                continue
            if keep is not None and complete >= keep:
                if problem := self._remove_whole(one.tag, one.path, nonce):
                    problems.append(problem)
                else:
                    removed.append(one.tag)
            complete += _has_all_files(one)
        return removed, problems

    def next_serial(self) -> int:
        """The number of the next save."""
        return 1 + max((one.manifest.serial for one in find_candidates(self.path) if one.manifest), default=0)

    def remove(self, tag: str, seconds: float) -> str | None:
        """Remove the checkpoint of this tag; what is in the way, if anything. Raises TimeoutError where another job has
        the folder locked for more than `seconds`."""
        with lock_folder(self.path, seconds):
            return self._remove_whole(tag, self.path / tag, secrets.token_hex(4))

    def _clear_up(self, lock: FolderLock) -> Iterator[str]:
        """Bring back what a killed save had moved aside, and remove all else that killed saves, not live jobs, have
        left. Yields what could not be done."""
        for path in sorted(self.path.iterdir()):
            hidden = HIDDEN.fullmatch(path.name)
            if not hidden or not _is_over(path, hidden["state"], lock):
                continue
            if hidden["state"] == "replaced" and not os.path.lexists(self.path / hidden["tag"]):
                problem = _rename(path, self.path / hidden["tag"])
            else:
                problem = remove(path)
            if problem:
                yield problem

    def _remove_whole(self, tag: str, path: Path, nonce: str) -> str | None:
        """Remove a checkpoint; what is in the way, if anything."""
        # Half removed under its own name it would look like a damaged one.
        removed = self.hidden(tag, nonce, "removed")
        return _rename(path, removed) or remove(removed)


def _has_all_files(one: Candidate) -> bool:
    """Whether every file is there in its full length; no more than that is cheap to know."""
    files = one.manifest.files if one.manifest else ()
    try:
        return bool(files) and all((one.path / file.name).stat().st_size == file.size for file in files)
    except OSError:
        return False


def _rename(path: Path, target: Path) -> str | None:
    """Give `path` another name; what is in the way, if anything."""
    try:
        os.rename(path, target)
    except OSError as error:
        return f"{path} cannot be moved: {error.strerror or error}"
    return None


# What ranks write, and rank 0 waits for

_POLL_SECONDS = 0.002
_SLOWEST_POLL_SECONDS = 0.1


class _Abandoned(Exception):  # noqa: N818 - it is not a fault
    """No caller waits for this save any more."""


def await_receipts(
    folder: Path, world_size: int, timeout: float, abandoned: threading.Event, beat: Callable[[], None]
) -> list[RankFile]:
    """What the receipts of all ranks say, once they are there, for which `timeout` seconds are waited at most.

    `beat` is called again and again meanwhile. Raises TimeoutError, OSError, _Abandoned.
    """
    deadline = time.monotonic() + timeout
    files: list[RankFile] = []
    pause = _POLL_SECONDS
    while (rank := len(files)) < world_size:
        try:
            file = RANK_FILE.validate_python(json.loads(receipt_in(folder, rank).read_bytes()))
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} did not finish writing its file in time") from None
            if abandoned.wait(pause):
                raise _Abandoned from None
            beat()
            pause = min(2 * pause, _SLOWEST_POLL_SECONDS)
        else:
            check_length(folder, rank, file)
            files.append(file)
            pause = _POLL_SECONDS
    return files


def check_length(folder: Path, rank: int, file: RankFile) -> None:
    """Raise OSError where a rank's file has lost bytes."""
    written = (folder / file.name).stat().st_size
    if written != file.size:
        raise OSError(f"{file.name} of rank {rank} has {written} bytes instead of {file.size}")


def receipt_in(folder: Path, rank: int) -> Path:
    """Where a rank says that its file is written."""
    return folder / f"rank-{rank}.json"


# Locks

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


@contextmanager
def lock_folder(folder: Path, seconds: float) -> Iterator[FolderLock]:
    """Have `folder` for oneself. Raises TimeoutError where another has it for more than `seconds`."""
    path, advice = folder / LOCK, "let no two jobs save to this folder at a time"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise NotAFileError(f"{path} is not a file")
    except OSError as error:
        yield FolderLock(f"{path} cannot be locked, {error.strerror or error}: {advice}", time.time())
        return
    try:
        deadline, pause = time.monotonic() + seconds, _POLL_SECONDS
        while (locked := _try_lock(descriptor, fcntl.LOCK_EX)) is False:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"another process has held {path} for more than {seconds:g} s: see whether a job that saves to the "
                    "same folder hangs"
                )
            time.sleep(pause)
            pause = min(2 * pause, _SLOWEST_POLL_SECONDS)
        with suppress(OSError):
            os.utime(descriptor)
        problem = None if locked else f"{path} cannot be locked, its file system has no locks: {advice}"
        yield FolderLock(problem, os.fstat(descriptor).st_mtime)
    finally:
        _unlock(descriptor)


class Claim:
    """The mark in the folder of a save that a live job is writing it, from its making to `release`. Raises OSError."""

    def __init__(self, partial: Path) -> None:
        self._path = partial / _OWNER
        self._descriptor: int | None = create_file(self._path)
        self._beaten = time.monotonic()
        locked = _try_lock(self._descriptor, fcntl.LOCK_EX) is True
        try:
            os.write(self._descriptor, json.dumps({**_process(os.getpid()), "locked": locked}).encode())
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


def _is_over(path: Path, state: str, lock: FolderLock) -> bool:
    """Whether a hidden name is of a save that no process writes any more."""
    owner: Any = None
    descriptor = None
    if state == "partial" and path.is_dir():
        with suppress(OSError, ValueError, RecursionError):
            owner = json.loads(read_file(path / _OWNER, _LONGEST_OWNER))
            descriptor = open_file(path / _OWNER) if isinstance(owner, dict) else None
    if descriptor is None:
        # A save gets its mark, and loses it, while its job has the folder's lock; so begin and end the other states.
        return lock.problem is None or _is_quiet(path, lock.now)
    try:
        free = _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        _unlock(descriptor)
    if free is False:
        return False
    here = _process(owner.get("pid"))
    if (owner.get("host"), owner.get("boot")) != (here["host"], here["boot"]):
        return _is_quiet(path, lock.now)
    # Not another process that was given its number since, where the system says when one began.
    alive = _runs(here["pid"]) and here["started"] == owner.get("started")
    return (free is True and owner.get("locked") is True) or not alive


def _is_quiet(path: Path, now: float) -> bool:
    """Whether nothing in the folder `path`, or the file, was written to for long."""
    try:
        entries = [path, *path.iterdir()] if path.is_dir() and not path.is_symlink() else [path]
        return max(one.lstat().st_mtime for one in entries) < now - _QUIET_SECONDS
    except OSError:
        return False


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


def _process(pid: object) -> dict[str, object]:
    """What tells a process from every other: host, the start of its system, number, and when it began by that."""
    boot = started = None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if type(pid) is int:
        with suppress(OSError, IndexError):
            # The second field is the program's name, in parentheses, and may hold anything.
            started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return {"host": socket.gethostname(), "boot": boot, "pid": pid, "started": started}


def _runs(pid: object) -> bool:
    if type(pid) is not int or not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is another user's
    return True
