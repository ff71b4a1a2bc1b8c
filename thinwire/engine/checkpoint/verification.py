"""Whether a checkpoint is whole: every file there, every byte as it was written, every parameter exactly once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.engine.checkpoint.errors import CheckpointError
from thinwire.engine.checkpoint.held import HeldCheckpoint
from thinwire.engine.checkpoint.manifest import MANIFEST, Manifest, RankFile
from thinwire.engine.checkpoint.pickles import is_pickle
from thinwire.engine.checkpoint.regular_files import NotAFileError
from thinwire.engine.checkpoint.tensor_file import dtype_from_name
from thinwire.engine.checkpoint.tensor_reader import checksum

__all__ = ["Examination", "examine", "hold", "unreadable_files"]


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
