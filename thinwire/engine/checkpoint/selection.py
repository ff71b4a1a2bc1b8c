"""Verification of a checkpoint, and the choice of the one to load: the newest that is whole and of this model.

Whole: every file there, every byte as it was written, every parameter exactly once. All ranks choose the same."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.comm import Communicator
from thinwire.engine.checkpoint.files import CheckpointError, NotAFileError, is_pickle
from thinwire.engine.checkpoint.folder import CheckpointFolder, check_tag
from thinwire.engine.checkpoint.manifest import MANIFEST, Manifest, RankFile
from thinwire.engine.checkpoint.reading import HeldCheckpoint, LoadedCheckpoint
from thinwire.engine.checkpoint.tensor_file import checksum, dtype_from_name

__all__ = ["Examination", "examine", "hold", "select", "unreadable_files"]


@dataclass(frozen=True)
class Examination:
    """What was found: problems, each naming a file, and where the manifest could be read what it says.

    `held`: what was examined, to be read; None where something is wrong with it. `digest`: the sha256 of the manifest's
    file. `moved`: whether the name led elsewhere before the end, so that looking again may find something better.
    """

    held: HeldCheckpoint | None
    manifest: Manifest | None
    digest: str
    problems: list[str]
    moved: bool


def examine(path: Path) -> Examination:
    """Open all files of the checkpoint in `path`, and read every byte of them."""
    found = hold(path)
    if found.held is None or found.manifest is None:
        return found
    problems = unreadable_files(found.held, found.manifest.files)
    return _refused(found.held, found.manifest, problems) if problems else found


def hold(path: Path) -> Examination:
    """Open all files of the checkpoint in `path`, read its manifest, and look at the files' lengths."""
    try:
        held = HeldCheckpoint(path)
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        why = "the folder is not there, or this rank does not see it" if gone else str(error)
        return Examination(None, None, "", [f"{MANIFEST} is missing: {why}"], gone)
    try:
        content = held.manifest()
        manifest = Manifest.decode(content)
    except CheckpointError as error:
        pickle = ", and it is a pickle" if is_pickle(path / MANIFEST) else ""
        return _refused(held, None, [f"{error}{pickle}"])
    problem = manifest.incompleteness()
    problems = [f"{MANIFEST}: {problem}"] if problem else _said(held, manifest.files, _problem_of_length)
    if problems:
        return _refused(held, manifest, problems)
    return Examination(held, manifest, hashlib.sha256(content).hexdigest(), [], False)


def unreadable_files(held: HeldCheckpoint, files: Sequence[RankFile]) -> list[str]:
    """What is wrong with the content of these files, every byte of which is read."""
    return _said(held, files, _problem_of_content)


def _refused(held: HeldCheckpoint, manifest: Manifest | None, problems: list[str]) -> Examination:
    moved = not held.has_its_name
    held.close()
    return Examination(None, manifest, "", problems, moved)


def _said(
    held: HeldCheckpoint, files: Sequence[RankFile], problem_of: Callable[[HeldCheckpoint, RankFile], str | None]
) -> list[str]:
    """The problems of those files that have one, each after the file's name."""
    found = []
    for file in files:
        try:
            problem = problem_of(held, file)
        except FileNotFoundError:
            problem = "is missing"
        except NotAFileError:
            problem = "is not a file"
        except (OSError, CheckpointError) as error:
            problem = f"cannot be read: {error}"
        if problem:
            found.append(f"{file.name} {problem}")
    return found


def _problem_of_length(held: HeldCheckpoint, file: RankFile) -> str | None:
    size = os.fstat(held.file(file.name)).st_size
    if size == file.size:
        return None
    return f"has {size} bytes, {file.size} were written{_if_pickle(held.path / file.name)}"


def _problem_of_content(held: HeldCheckpoint, file: RankFile) -> str | None:
    if checksum(held.file(file.name)) == file.sha256:
        return _problem_of_header(held, file)
    pickle = _if_pickle(held.path / file.name)
    return f"is damaged: its content does not have the checksum of what was written{pickle}"


def _if_pickle(path: Path) -> str:
    return "; it is a pickle, which thinwire never loads" if is_pickle(path) else ""


def _problem_of_header(held: HeldCheckpoint, file: RankFile) -> str | None:
    try:
        tensors = held.reader(file.name).tensors
        expected = {*(entry.key for entry in file.slices), *file.rank_tensors.values(), *file.buffers.values()}
        if tensors.keys() != expected:
            return f"and the manifest differ on its tensors: {sorted(tensors.keys() ^ expected)[0]!r}"
        for entry in file.slices:
            stored = tensors[entry.key]
            if stored.shape != (entry.numel,) or stored.dtype != dtype_from_name(entry.dtype):
                return f"and the manifest differ on {entry.key!r}"
    except ValueError as error:
        return f"is no safetensors file: {error}"
    return None


# Beside a job that saves, a checkpoint can be replaced or removed while it is looked at: then a new look finds a whole
# one. Every look sees later saves, so a few are enough.
_LOOKS = 8


def select(
    folder: CheckpointFolder, comm: Communicator, tag: str | None, fault_of: Callable[[Manifest], str | None]
) -> LoadedCheckpoint | None:
    """Verify and open a checkpoint as CheckpointStore.load says; `fault_of` finds why a whole one is of no use here.

    Collective.
    """
    for looks_left in reversed(range(_LOOKS)):
        listing = _agree_on_listing(folder, comm, tag)
        choice = _Choice(folder, comm, fault_of, bool(looks_left))
        try:
            return choice.newest(listing) if tag is None else choice.tagged(tag, listing)
        except _MovedError:
            continue
    raise AssertionError("the last look settles for what it finds")


class _MovedError(Exception):
    """A checkpoint was replaced or removed while it was looked at."""


@dataclass(frozen=True)
class _Listing:
    """What rank 0 saw: (tag, folder's name) of the candidates in the order to try, and doubts about the first."""

    candidates: list[tuple[str, str]]
    complaint: str | None


@dataclass(frozen=True)
class _Verdict:
    """What all ranks together found; `refusal` says what is wrong, naming the file or parameter."""

    checkpoint: LoadedCheckpoint | None
    refusal: str


class _Choice:
    def __init__(
        self,
        folder: CheckpointFolder,
        comm: Communicator,
        fault_of: Callable[[Manifest], str | None],
        may_look_again: bool,
    ) -> None:
        self._folder = folder
        self._comm = comm
        self._fault_of = fault_of
        self._may_look_again = may_look_again

    def newest(self, listing: _Listing) -> LoadedCheckpoint | None:
        """The first that can be loaded; None where there are no candidates."""
        refusals: list[str] = []
        for tag, name in listing.candidates:
            verdict = self._judge(tag, name)
            if verdict.checkpoint:
                self._warn([f"{refusal}. Loading {tag!r} instead" for refusal in refusals])
                self._warn([listing.complaint] if listing.complaint and not refusals else [])
                return verdict.checkpoint
            refusals.append(f"checkpoint {tag!r} in {self._folder.path} cannot be loaded: {verdict.refusal}")
        if refusals:
            raise CheckpointError(f"there is no whole checkpoint of this model: {'; '.join(refusals)}")
        return None

    def tagged(self, tag: str, listing: _Listing) -> LoadedCheckpoint:
        """The one with this tag."""
        names = dict(listing.candidates)
        refusal = "there is none of that name"
        if tag in names:
            verdict = self._judge(tag, names.pop(tag))
            if verdict.checkpoint:
                return verdict.checkpoint
            refusal = verdict.refusal
        whole = [repr(other) for other, name in names.items() if self._is_whole(other, name)]
        instead = f"whole ones of this model: {', '.join(whole)}" if whole else "there is no other whole one"
        raise CheckpointError(f"checkpoint {tag!r} in {self._folder.path} cannot be loaded: {refusal}; {instead}")

    def _is_whole(self, tag: str, name: str) -> bool:
        checkpoint = self._judge(tag, name).checkpoint
        if checkpoint is not None:
            checkpoint.close()
        return checkpoint is not None

    def _judge(self, tag: str, name: str) -> _Verdict:
        path = self._folder.path / name
        mine = hold(path)
        refusal = self._refusal_on_sight(mine)
        if refusal is None and mine.held is not None and mine.manifest is not None:
            share = mine.manifest.files[self._comm.rank :: self._comm.size]
            refusal = _joined(_gather(self._comm, {"problems": unreadable_files(mine.held, share)}))
            if refusal is None:
                return _Verdict(LoadedCheckpoint(mine.held, tag, mine.manifest), "")
        if mine.held is not None:
            mine.held.close()
        return _Verdict(None, refusal or "")

    def _refusal_on_sight(self, mine: Examination) -> str | None:
        """What is against a checkpoint before its files are read to their ends; with nothing, all ranks hold the same.

        Raises _MovedError, on every rank, where that may be a race with a save.
        """
        fault = None if mine.held is None or mine.manifest is None else self._fault_of(mine.manifest)
        findings = _gather(
            self._comm, {"digest": mine.digest, "problems": mine.problems, "moved": mine.moved, "fault": fault}
        )
        versions = {finding["digest"] for finding in findings}
        if self._may_look_again and (any(finding["moved"] for finding in findings) or len(versions - {""}) > 1):
            raise _MovedError
        if damage := _joined(findings):
            return damage
        if len(versions) > 1:
            return f"ranks see different versions of its {MANIFEST}; the folder must be shared"
        return next((finding["fault"] for finding in findings if finding["fault"]), None)

    def _warn(self, messages: list[str]) -> None:
        if self._comm.rank == 0:
            for message in messages:
                warnings.warn(message, RuntimeWarning, stacklevel=5)


def _agree_on_listing(folder: CheckpointFolder, comm: Communicator, tag: str | None) -> _Listing:
    """What rank 0 finds in the folder, or its error, on every rank."""
    found: dict[str, Any] = {"tag": tag}
    if comm.rank == 0:
        try:
            found |= _list(folder, tag)
        except (CheckpointError, OSError) as error:
            found["error"] = str(error)
    everyones = _gather(comm, found)
    first = everyones[0]
    for rank, other in enumerate(everyones):
        if other["tag"] != first["tag"]:
            raise ValueError(
                f"rank {rank} loads tag {other['tag']!r}, rank 0 tag {first['tag']!r}: every rank must load the same"
            )
    if "error" in first:
        raise CheckpointError(first["error"])
    return _Listing([(tag, name) for tag, name in first["candidates"]], first["complaint"])


def _list(folder: CheckpointFolder, tag: str | None) -> dict[str, Any]:
    if tag is not None:
        try:
            check_tag(tag)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        folder.refuse_pickle(tag)
    candidates = folder.candidates()
    return {
        "candidates": [(one.tag, one.path.name) for one in candidates],
        "complaint": folder.complaint_about_latest(candidates),
    }


def _gather(comm: Communicator, found: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(message) for message in comm.all_gather_bytes(json.dumps(found).encode(), "choose a checkpoint")]


def _joined(findings: list[dict[str, Any]]) -> str | None:
    """The problems that any rank has found, each once."""
    problems = dict.fromkeys(problem for finding in findings for problem in finding["problems"])
    return "; ".join(problems) or None
