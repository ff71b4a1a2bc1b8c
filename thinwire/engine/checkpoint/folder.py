"""The folder in which a job keeps its checkpoints: how one appears there whole or not at all, whatever is killed when,
and which of them is the newest."""

from __future__ import annotations

import math
import os
import re
import secrets
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.engine.checkpoint.files import (
    ADVICE,
    IMPORTABLE,
    CheckpointError,
    find_pickle,
    has_importable_files,
    is_pickle,
    read_file,
    remove,
    sync_folder,
    write_whole,
)
from thinwire.engine.checkpoint.locks import Claim, FolderLock, is_abandoned, is_quiet, lock_folder
from thinwire.engine.checkpoint.manifest import MANIFEST, Manifest, Run, read_manifest

__all__ = ["LATEST", "Candidate", "CheckpointFolder", "ClearedUp", "check_folder", "check_tag"]

LATEST = "latest"

_LONGEST_TAG = 200
_LONGEST_POINTER = 4096  # more than a tag, so that a wrong one can be quoted
_RANK_FILE = re.compile(r"rank-.*\.safetensors", re.DOTALL)
# A folder's name while a save is in flight or being undone; the hexadecimal number is the save's own.
_HIDDEN = re.compile(r"\.(?P<tag>.+)\.[0-9a-f]{8}\.(?P<state>partial|replaced|removed)(\.unfinished)?", re.DOTALL)


def check_folder(folder: object, name: str) -> None:
    """Raise TypeError or ValueError for what cannot be the path `name` of a folder."""
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(path, str):
        raise TypeError(f"{name} must be a folder's path, a str or os.PathLike, got {folder!r}")
    if not path or "\0" in path:
        raise ValueError(f"{name} must be a folder's path, such as 'runs/example', got {path!r}: name one, or '.'")


def check_tag(tag: str) -> None:
    """Raise ValueError for what cannot be the name of a checkpoint's folder."""
    printable = isinstance(tag, str) and tag.isprintable() and 0 < len(tag.encode()) <= _LONGEST_TAG
    if not printable or "/" in tag or "\\" in tag or tag.startswith(".") or tag == LATEST:
        raise ValueError(
            f"{tag!r} cannot be a checkpoint's tag: give a name of 1 to {_LONGEST_TAG} bytes without slashes that does "
            f"not start with a dot and is not {LATEST!r}, such as 'step-100'"
        )


@dataclass(frozen=True)
class Candidate:
    """A folder that looks like a checkpoint, whole or not. `manifest` is None where it cannot be read."""

    tag: str
    path: Path
    manifest: Manifest | None

    @property
    def serial(self) -> float:
        """Its place in the order of saves; after all others where that cannot be read, as it may be the newest."""
        return self.manifest.serial if self.manifest else math.inf

    @property
    def has_all_files(self) -> bool:
        """Whether every file is there in its full length; no more than that is cheap to know."""
        if self.manifest is None:
            return False
        try:
            return all((self.path / file.name).stat().st_size == file.size for file in self.manifest.files)
        except OSError:
            return False


@dataclass(frozen=True)
class ClearedUp:
    """What became of older checkpoints: tags of those removed, and what could not be done."""

    removed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class CheckpointFolder:
    """`path`/latest, `path`/TAG/ for each checkpoint, and names with a leading dot for what is not one (yet).

    Only rank 0 of a job changes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def locked(self, seconds: float) -> AbstractContextManager[FolderLock]:
        """What `publish` and `prune` need around them. Raises TimeoutError where another has it for too long."""
        return lock_folder(self.path, seconds)

    def partial(self, tag: str, nonce: str) -> Path:
        """Where the files of a save lie while they are written."""
        return self._hidden(tag, nonce, "partial")

    def check_free(self, tag: str) -> None:
        """Raise ValueError where a checkpoint of this tag would replace something that is none."""
        path = self.path / tag
        if os.path.exists(self.path) and not os.path.isdir(self.path):  # unlike Path's, these raise no OSError
            raise ValueError(f"{self.path} is not a folder: give one in which checkpoints can be kept")
        if os.path.lexists(path) and not _looks_like_one(path):
            raise ValueError(f"{path} exists and is no checkpoint: give another tag, or move it away")

    def prepare(self, tag: str, nonce: str, seconds: float) -> tuple[Claim, list[str]]:
        """Make the folder of a save, and clear up behind saves that were killed; what could not be cleared up.

        Raises OSError, TimeoutError where another job has the folder locked for more than `seconds`.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with lock_folder(self.path, seconds) as lock:
            problems = [lock.problem] if lock.problem else []
            problems += self._clear_up(lock)
            partial = self.partial(tag, nonce)
            partial.mkdir()
            try:
                return Claim(partial), problems
            except OSError:
                remove(partial)
                raise

    def publish(self, tag: str, nonce: str, latest: bool = True) -> None:
        """Give a save, complete in its partial folder, its name, then name it in `latest` if asked to. Raises OSError.

        A checkpoint of the same tag is moved aside, for `prune` to remove; a load finds it where it was moved to.
        """
        partial, whole, replaced = self.partial(tag, nonce), self.path / tag, self._hidden(tag, nonce, "replaced")
        sync_folder(partial)
        # Whatever needs space comes first: from here on there are only renames.
        pointer = self._hidden(LATEST, nonce, "partial")
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
        for name in ("partial", "partial.unfinished"):
            remove(self._hidden(LATEST, nonce, name))
        remove(self.partial(tag, nonce))

    def prune(self, tag: str, nonce: str, keep: int | None, run: Run) -> ClearedUp:
        """Remove what the save `tag` has replaced and, of what `run` wrote, what is older than the newest `keep` whole
        ones; all stay where `keep` is None."""
        problem = remove(self._hidden(tag, nonce, "replaced"))
        done = ClearedUp([], [problem] if problem else [])
        complete = 0
        for candidate in self._newest_first() if keep is not None else []:
            # A checkpoint that a user has copied or renamed is theirs to remove, as another job's is.
            if (
                candidate.manifest is None
                or candidate.manifest.tag != candidate.tag
                or not run.wrote(candidate.manifest)
            ):
                continue
            if keep is not None and complete >= keep:
                if problem := self._remove_whole(candidate, nonce):
                    done.problems.append(problem)
                else:
                    done.removed.append(candidate.tag)
            complete += candidate.has_all_files
        return done

    def remove(self, tag: str, seconds: float) -> str | None:
        """Remove the checkpoint of this tag; what is in the way, if anything. Raises TimeoutError where another job has
        the folder locked for more than `seconds`."""
        with self.locked(seconds):
            return self._remove_whole(_candidate(tag, self.path / tag), secrets.token_hex(4))

    def next_serial(self) -> int:
        """The number of the next save."""
        return 1 + max((one.manifest.serial for one in self._found() if one.manifest), default=0)

    def candidates(self) -> list[Candidate]:
        """What a load should look at, in this order: what `latest` names, then the newest.

        Raises CheckpointError where there is none and pickles are offered in their place.
        """
        found = self._newest_first()
        if not found:
            self._refuse_pickles()
        latest = self._latest()
        return sorted(found, key=lambda one: one.tag != latest)

    def complaint_about_latest(self, candidates: list[Candidate]) -> str | None:
        """Why the first of the candidates may not be the one that is expected."""
        latest = self._latest()
        if latest is None or not candidates:
            return None
        first = candidates[0]
        if first.tag != latest:
            return f"{self.path / LATEST} names {latest!r}, which is not there"
        newer = [one.tag for one in candidates if one.manifest and one.serial > first.serial]
        if newer:
            return (
                f"{self.path / LATEST} names {latest!r}, although {newer[0]!r} is newer; give its tag if that is the "
                "one to load"
            )
        return None

    def refuse_pickle(self, tag: str) -> None:
        """Raise CheckpointError if what lies under a tag is made of pickles instead of a checkpoint."""
        path = self.path / tag
        if path.is_file() and is_pickle(path):
            raise CheckpointError(f"{path} is no checkpoint but {ADVICE}")
        if has_importable_files(path) and not _looks_like_one(path):
            raise CheckpointError(_importable(path))
        if path.is_dir() and not _looks_like_one(path) and (pickle := find_pickle(path)):
            raise CheckpointError(f"{path} is no thinwire checkpoint: {pickle} is {ADVICE}")

    def _refuse_pickles(self) -> None:
        if self.path.is_file():
            what = ADVICE if is_pickle(self.path) else "a file: give the folder that holds the checkpoints"
            raise CheckpointError(f"{self.path} is no folder of checkpoints but {what}")
        if has_importable_files(self.path):
            raise CheckpointError(_importable(self.path))
        if pickle := find_pickle(self.path):
            raise CheckpointError(f"{self.path} holds no thinwire checkpoint: {pickle} is {ADVICE}")

    def _latest(self) -> str | None:
        """The tag that `latest` names."""
        try:
            content = read_file(self.path / LATEST, _LONGEST_POINTER)
        except OSError:
            return None
        return content.decode(errors="backslashreplace").removesuffix("\n")

    def _newest_first(self) -> list[Candidate]:
        return sorted(self._found(), key=lambda one: one.serial, reverse=True)

    def _found(self) -> list[Candidate]:
        if not self.path.is_dir():
            return []
        found = []
        for path in sorted(self.path.iterdir()):
            hidden = _HIDDEN.fullmatch(path.name)
            if hidden and hidden["state"] == "replaced" and not (self.path / hidden["tag"]).exists():
                found.append(_candidate(hidden["tag"], path))
            elif not path.name.startswith(".") and _looks_like_one(path):
                found.append(_candidate(path.name, path))
        return found

    def _clear_up(self, lock: FolderLock) -> list[str]:
        """Bring back what a killed save had moved aside, and remove everything else that killed saves have left.

        What a live job may have in flight stays. Returns what could not be done.
        """
        problems = []
        for path in sorted(self.path.iterdir()):
            hidden = _HIDDEN.fullmatch(path.name)
            if not hidden or not _is_leftover(path, hidden["state"], lock):
                continue
            problem = None
            if hidden["state"] == "replaced" and not os.path.lexists(self.path / hidden["tag"]):
                problem = _rename(path, self.path / hidden["tag"])
            else:
                problem = remove(path)
            if problem:
                problems.append(problem)
        return problems

    def _remove_whole(self, candidate: Candidate, nonce: str) -> str | None:
        """Remove a checkpoint; what is in the way, if anything."""
        # Half removed under its own name it would look like a damaged one.
        removed = self._hidden(candidate.tag, nonce, "removed")
        return _rename(candidate.path, removed) or remove(removed)

    def _hidden(self, tag: str, nonce: str, state: str) -> Path:
        return self.path / f".{tag}.{nonce}.{state}"


def _importable(path: Path) -> str:
    """Advice on another library's checkpoint, or a folder of them."""
    one = any(path.glob(IMPORTABLE))
    command = f"{path.absolute().parent} --tag {path.name}" if one else f"{path}"
    return (
        f"{path} is another library's, made of pickles: turn it into a checkpoint of thinwire's with "
        f"`thinwire checkpoint import {command}`, and load that"
    )


def _candidate(tag: str, path: Path) -> Candidate:
    try:
        return Candidate(tag, path, read_manifest(path))
    except CheckpointError:
        return Candidate(tag, path, None)


def _is_leftover(path: Path, state: str, lock: FolderLock) -> bool:
    """Whether a hidden name is of a save that is over."""
    if state == "partial" and path.is_dir():
        return is_abandoned(path, lock)
    # The other states begin and end while a job has the folder's lock.
    return lock.exclusive or is_quiet(path, lock.now)


def _rename(path: Path, target: Path) -> str | None:
    """Give `path` another name; what is in the way, if anything."""
    try:
        os.rename(path, target)
    except OSError as error:
        return f"{path} cannot be moved: {error.strerror or error}"
    return None


def _looks_like_one(path: Path) -> bool:
    try:
        return any(name == MANIFEST or _RANK_FILE.fullmatch(name) for name in os.listdir(path))
    except OSError:
        return False
