"""Chooses the checkpoint to load: the newest that is whole and of this model, on all ranks the same."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from typing import Any

from thinwire.comm import Communicator
from thinwire.engine.checkpoint.errors import CheckpointError
from thinwire.engine.checkpoint.folder import CheckpointFolder, check_tag
from thinwire.engine.checkpoint.manifest import MANIFEST
from thinwire.engine.checkpoint.reading import LoadedCheckpoint
from thinwire.engine.checkpoint.snapshot import ModelDescription
from thinwire.engine.checkpoint.verification import examine

__all__ = ["select"]


def select(
    folder: CheckpointFolder, comm: Communicator, tag: str | None, description: ModelDescription | None
) -> LoadedCheckpoint | None:
    """Verify and open a checkpoint as CheckpointStore.load says. Collective."""
    listing = _agree_on_listing(folder, comm, tag)
    choice = _Choice(folder, comm, description)
    return choice.newest(listing) if tag is None else choice.tagged(tag, listing)


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
    def __init__(self, folder: CheckpointFolder, comm: Communicator, description: ModelDescription | None) -> None:
        self._folder = folder
        self._comm = comm
        self._description = description

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
        whole = [repr(other) for other, name in names.items() if self._judge(other, name).checkpoint]
        instead = f"whole ones of this model: {', '.join(whole)}" if whole else "there is no other whole one"
        raise CheckpointError(f"checkpoint {tag!r} in {self._folder.path} cannot be loaded: {refusal}; {instead}")

    def _judge(self, tag: str, name: str) -> _Verdict:
        path = self._folder.path / name
        mine = examine(path, self._comm.rank, self._comm.size)
        difference = None
        if self._description is not None and mine.manifest is not None:
            difference = self._description.difference_to(mine.manifest.model)
        found = {"digest": mine.digest, "problems": mine.problems, "difference": difference}
        findings = _gather(self._comm, found)
        damage = dict.fromkeys(problem for finding in findings for problem in finding["problems"])
        if damage:
            return _Verdict(None, "; ".join(damage))
        if len({finding["digest"] for finding in findings}) > 1:
            return _Verdict(None, f"ranks see different versions of its {MANIFEST}; the folder must be shared")
        for finding in findings:
            if finding["difference"]:
                return _Verdict(None, f"it is of another model: {finding['difference']}")
        assert mine.manifest is not None
        return _Verdict(LoadedCheckpoint(path, tag, mine.manifest), "")

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
    return [json.loads(message) for message in comm.all_gather_bytes(json.dumps(found).encode())]
