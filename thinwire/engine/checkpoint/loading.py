"""Loading of a checkpoint: the newest that is whole and of this model is chosen, the same on all ranks, and read in
whatever runs the reader needs.

Whole: every file there, every byte as it was written, every parameter exactly once. A checkpoint is held by descriptors
from its manifest to the last value, so that what is read is what was verified.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.agreement import gather
from thinwire.engine.checkpoint.files import DTYPES, HeldFolder, NotAFileError, checksum, read_file
from thinwire.engine.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    Candidate,
    Manifest,
    RankFile,
    SliceEntry,
    check_tag,
    find_candidates,
    looks_like_checkpoint,
    manifest_bytes,
)
from thinwire.engine.checkpoint.pickles import is_pickle, refuse_pickle, refuse_pickles
from thinwire.engine.checkpoint.regions import ONE_VALUE, Cut
from thinwire.engine.errors import CheckpointError
from thinwire.zero import SliceSource


class LoadedCheckpoint:
    """A SliceSource over the files of one checkpoint.

    It reads from `held` alone, what was verified, and closes it: `close`, or leaving a `with`, ends all reading.
    `path` is where the checkpoint was found, `shared` holds the JSON values of the whole job, `model` describes the
    model that was saved by `world_size` ranks, of which some lie in `cuts`. `kept`, if set, answers for parameters that
    are not in it.

    Reading raises CheckpointError where a file can no longer be read.
    """

    def __init__(self, held: HeldFolder, tag: str, manifest: Manifest) -> None:
        self.path, self.tag = held.path, tag
        self.manifest = manifest
        self.shared, self.model = manifest.shared, manifest.model
        self.world_size = manifest.world_size
        self.kept: SliceSource | None = None
        self.cuts = dict[str, Cut]()
        if "cuts" in self.shared:
            self.cuts |= {name: Cut(*one) for name, one in self.shared["cuts"].items()}
        self._held = held
        self._last: tuple[tuple[str, str], Tensor] | None = None
        self._entries: dict[tuple[str, str], list[SliceEntry]] = defaultdict(list)
        for entry in sorted(manifest.slices, key=lambda entry: (entry.start, entry.numel)):
            self._entries[entry.kind, entry.name].append(entry)

    def counters(self) -> dict[str, Any]:
        """What the optimizer's `counters` returned."""
        counters: dict[str, Any] = self.shared["optimizer"]
        return counters

    def rank_values(self, rank: int) -> dict[str, Any]:
        """The JSON values of that rank of the saving job; KeyError where there was none."""
        return self._rank(rank).values

    def kinds(self) -> set[str]:
        """The roles that any parameter has values for."""
        return {kind for kind, _ in self._entries}

    def rank_keys(self, rank: int) -> Collection[str]:
        """The keys of what `read_rank` has of that rank of the saving job."""
        return self._rank(rank).rank_tensors.keys()

    def dtype_of(self, kind: str, name: str) -> torch.dtype | None:
        """What this parameter's values of this kind were saved in, or None where there are none."""
        if self.kept is not None and name not in self.model.parameters:
            return self.kept.dtype_of(kind, name)
        entries = self._entries.get((kind, name))
        return DTYPES[entries[0].dtype] if entries else None

    def read(self, kind: str, name: str, start: int, numel: int, *, in_parts: bool = False) -> Tensor:
        """These values, [numel] on the CPU; KeyError if no rank saved them. `in_parts`: of what is cut part by part."""
        if name in self.cuts and not in_parts and not kind.startswith(ONE_VALUE):
            if self._last is None or self._last[0] != (kind, name):
                parts = self.read(kind, name, 0, self.model.numel(name), in_parts=True)
                self._last = (kind, name), self.cuts[name].put_together(parts, self.model.parameters[name][0])
            return self._last[1][start : start + numel]
        if self.kept is not None and name not in self.model.parameters:
            return self.kept.read(kind, name, start, numel)
        if kind == "weight" and numel == 0 and name in self.model.parameters and not self.model.numel(name):
            return torch.empty(0, dtype=self.model.parameters[name][1])  # an empty parameter is in no slice
        entries, stop = self._entries.get((kind, name)), start + numel
        if not entries or start < 0 or numel < 0 or stop > entries[-1].start + entries[-1].numel:
            raise KeyError(f"elements {start} to {stop} of {kind} of {name!r} are not in checkpoint {self.tag!r}")
        runs: list[Tensor] = []
        for entry in entries[bisect_right(entries, start, key=lambda entry: entry.start) - 1 :]:
            low, high = max(start, entry.start), min(stop, entry.start + entry.numel)
            if entry.start >= stop:
                break
            if low < high:
                runs.append(self._held.read(entry.file, entry.key, low - entry.start, high - entry.start))
        if not runs:
            return torch.empty(0, dtype=DTYPES[entries[0].dtype])
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def read_rank(self, key: str, rank: int) -> Tensor:
        """`rank_tensors[key]` of that rank of the saving job; KeyError where there is none."""
        file = self._rank(rank)
        if key not in file.rank_tensors:
            raise KeyError(f"rank {rank} saved no {key!r} in checkpoint {self.tag!r}")
        return self._held.read(file.name, file.rank_tensors[key])

    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers, on the CPU."""
        return {
            name: self._held.read(file.name, key) for file in self.manifest.files for name, key in file.buffers.items()
        }

    def close(self) -> None:
        """Close the files: nothing can be read any more."""
        self._held.close()

    def __enter__(self) -> LoadedCheckpoint:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _rank(self, rank: int) -> RankFile:
        if not 0 <= rank < self.world_size:
            raise KeyError(f"there is no rank {rank} in checkpoint {self.tag!r}, saved by {self.world_size} ranks")
        return self.manifest.files[rank]


# Verification


@dataclass(frozen=True)
class Examination:
    """What was found: problems, each naming a file, and where the manifest could be read what it says.

    `held`: what was examined, to be read; None where something is wrong with it. `digest`: the sha256 of the manifest's
    file. `moved`: whether the name led elsewhere before the end, so that looking again may find something better.
    """

    held: HeldFolder | None
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
        held = HeldFolder(path)
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        why = "the folder is not there, or this rank does not see it" if gone else str(error)
        return Examination(None, None, "", [f"{MANIFEST} is missing: {why}"], gone)
    try:
        content = manifest_bytes(path, held.descriptor)
        manifest = Manifest.decode(content)
    except CheckpointError as error:
        pickle = ", and it is a pickle" if is_pickle(path / MANIFEST) else ""
        return _refused(held, None, [f"{error}{pickle}"])
    problem = manifest.incompleteness()
    problems = [f"{MANIFEST}: {problem}"] if problem else _said(held, manifest.files, _problem_of_length)
    if problems:
        return _refused(held, manifest, problems)
    return Examination(held, manifest, hashlib.sha256(content).hexdigest(), [], False)


def unreadable_files(held: HeldFolder, files: Sequence[RankFile]) -> list[str]:
    """What is wrong with the content of these files, every byte of which is read."""
    return _said(held, files, _problem_of_content)


def _refused(held: HeldFolder, manifest: Manifest | None, problems: list[str]) -> Examination:
    moved = not held.has_its_name
    held.close()
    return Examination(None, manifest, "", problems, moved)


def _said(
    held: HeldFolder, files: Sequence[RankFile], problem_of: Callable[[HeldFolder, RankFile], str | None]
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
            pickle = "; it is a pickle, which thinwire never loads" if is_pickle(held.path / file.name) else ""
            found.append(f"{file.name} {problem}{pickle}")
    return found


def _problem_of_length(held: HeldFolder, file: RankFile) -> str | None:
    size = os.fstat(held.file(file.name)).st_size
    return None if size == file.size else f"has {size} bytes, {file.size} were written"


def _problem_of_content(held: HeldFolder, file: RankFile) -> str | None:
    if checksum(held.file(file.name)) != file.sha256:
        return "is damaged: its content does not have the checksum of what was written"
    try:
        tensors = held.tensors(file.name)
    except ValueError as error:
        return f"is no safetensors file: {error}"
    expected = {*(entry.key for entry in file.slices), *file.rank_tensors.values(), *file.buffers.values()}
    if tensors.keys() != expected:
        return f"and the manifest differ on its tensors: {sorted(tensors.keys() ^ expected)[0]!r}"
    for entry in file.slices:
        stored = tensors[entry.key]
        if stored.shape != (entry.numel,) or stored.dtype != DTYPES[entry.dtype]:
            return f"and the manifest differ on {entry.key!r}"
    return None


# The choice

# Beside a job that saves, a checkpoint can be replaced or removed while it is looked at: then a new look finds a whole
# one. Every look sees later saves, so a few are enough.
_LOOKS = 8
_CHOOSE = "choose a checkpoint"
_LONGEST_POINTER = 4096  # more than a tag, so that a wrong one can be quoted


class _MovedError(Exception):
    """A checkpoint was replaced or removed while it was looked at."""


def select(
    folder: Path, comm: Communicator, tag: str | None, fault_of: Callable[[LoadedCheckpoint], str | None]
) -> LoadedCheckpoint | None:
    """Verify and open a checkpoint as CheckpointStore.load says; `fault_of` finds why a whole one is of no use here.

    Collective.
    """
    for looks_left in reversed(range(_LOOKS)):
        listed, complaint = _agree_on_listing(folder, comm, tag)
        look = _Look(folder, comm, fault_of, bool(looks_left))
        try:
            return look.newest(listed, complaint) if tag is None else look.tagged(tag, listed)
        except _MovedError:
            continue
    raise AssertionError("the last look settles for what it finds")


@dataclass(frozen=True)
class _Look:
    """One look at a folder, maybe not the last. Methods are collective, and raise _MovedError, on every rank, where
    what they find may be a race with a save."""

    folder: Path
    comm: Communicator
    fault_of: Callable[[LoadedCheckpoint], str | None]
    may_look_again: bool

    def newest(self, listed: list[tuple[str, str]], complaint: str | None) -> LoadedCheckpoint | None:
        """The first that can be loaded; None where there are no candidates."""
        refusals: list[str] = []
        for tag, name in listed:
            checkpoint, refusal = self._judge(tag, name)
            if checkpoint:
                doubts = [f"{refusal}. Loading {tag!r} instead" for refusal in refusals]
                for doubt in doubts or ([complaint] if complaint else ()) if self.comm.rank == 0 else ():
                    warnings.warn(doubt, RuntimeWarning, stacklevel=4)
                return checkpoint
            refusals.append(f"checkpoint {tag!r} in {self.folder} cannot be loaded: {refusal}")
        if refusals:
            raise CheckpointError(f"there is no whole checkpoint of this model: {'; '.join(refusals)}")
        return None

    def tagged(self, tag: str, listed: list[tuple[str, str]]) -> LoadedCheckpoint:
        """The one with this tag."""
        names = dict(listed)
        refusal = "there is none of that name"
        if tag in names:
            checkpoint, refusal = self._judge(tag, names.pop(tag))
            if checkpoint:
                return checkpoint
        whole = []
        for other, name in names.items():
            if (checkpoint := self._judge(other, name)[0]) is not None:
                checkpoint.close()
                whole.append(repr(other))
        instead = f"whole ones of this model: {', '.join(whole)}" if whole else "there is no other whole one"
        raise CheckpointError(f"checkpoint {tag!r} in {self.folder} cannot be loaded: {refusal}; {instead}")

    def _judge(self, tag: str, name: str) -> tuple[LoadedCheckpoint | None, str]:
        """What all ranks together find in `folder`/`name`: it, opened, or what is wrong, naming file or parameter."""
        mine, comm = hold(self.folder / name), self.comm
        checkpoint = LoadedCheckpoint(mine.held, tag, mine.manifest) if mine.held and mine.manifest else None
        fault = None if checkpoint is None else self.fault_of(checkpoint)
        found = {"digest": mine.digest, "problems": mine.problems, "moved": mine.moved, "fault": fault}
        findings = gather(comm, found, _CHOOSE)
        versions = {finding["digest"] for finding in findings}
        if self.may_look_again and (any(finding["moved"] for finding in findings) or len(versions - {""}) > 1):
            raise _MovedError
        refusal = _joined(findings)
        if not refusal and len(versions) > 1:
            refusal = f"ranks see different versions of its {MANIFEST}; the folder must be shared"
        refusal = refusal or next((finding["fault"] for finding in findings if finding["fault"]), "")
        # With nothing against it all ranks hold the same, and each reads its share of the files to their ends.
        if not refusal and mine.held is not None and checkpoint is not None:
            share = checkpoint.manifest.files[comm.rank :: comm.size]
            refusal = _joined(gather(comm, {"problems": unreadable_files(mine.held, share)}, _CHOOSE))
            if not refusal:
                return checkpoint, ""
        if mine.held is not None:
            mine.held.close()
        return None, refusal


def _agree_on_listing(folder: Path, comm: Communicator, tag: str | None) -> tuple[list[tuple[str, str]], str | None]:
    """(tag, folder's name) of what rank 0 finds, in the order to try, and doubts about the first; or its error."""
    found: dict[str, Any] = {"tag": tag}
    if comm.rank == 0:
        try:
            if tag is not None:
                check_tag(tag)
            candidates, found["complaint"] = candidates_to_load(folder, tag)
            found["listed"] = [(one.tag, one.path.name) for one in candidates]
        except (CheckpointError, OSError, ValueError) as error:
            found["error"] = str(error)
    everyones = gather(comm, found, _CHOOSE)
    first = everyones[0]
    for rank, other in enumerate(everyones):
        if other["tag"] != first["tag"]:
            raise ValueError(
                f"rank {rank} loads tag {other['tag']!r}, rank 0 tag {first['tag']!r}: every rank must load the same"
            )
    if "error" in first:
        raise CheckpointError(first["error"])
    return [(one, name) for one, name in first["listed"]], first["complaint"]


def candidates_to_load(folder: Path, tag: str | None) -> tuple[list[Candidate], str | None]:
    """What to look at, in this order: what `latest` names, then the newest; and why the first may not be expected.

    Raises CheckpointError for pickles: under `tag`, or where there is nothing else.
    """
    if tag is not None and not looks_like_checkpoint(folder / tag):
        refuse_pickle(folder / tag)
    found = find_candidates(folder)
    if not found:
        refuse_pickles(folder)
    try:
        latest = read_file(folder / LATEST, _LONGEST_POINTER).decode(errors="backslashreplace").removesuffix("\n")
    except OSError:
        return found, None
    found.sort(key=lambda one: one.tag != latest)
    if found and found[0].tag != latest:
        return found, f"{folder / LATEST} names {latest!r}, which is not there"
    named = found[0].manifest if found else None
    newer = [one.tag for one in found[1:] if named and one.manifest and one.manifest.serial > named.serial]
    if newer:
        instead = f"although {newer[0]!r} is newer; give its tag if that is the one to load"
        return found, f"{folder / LATEST} names {latest!r}, {instead}"
    return found, None


def _joined(findings: list[dict[str, Any]]) -> str:
    """The problems that any rank has found, each once."""
    return "; ".join(dict.fromkeys(problem for finding in findings for problem in finding["problems"]))
