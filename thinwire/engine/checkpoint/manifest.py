"""What a checkpoint says of itself: which file holds which run of which parameter, and every file's checksum. It
carries its own checksum, and its bytes are the only ones that spell its content, so no flipped bit goes unseen."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.engine.checkpoint.errors import CheckpointError
from thinwire.engine.checkpoint.snapshot import ModelDescription, values_of_kind

__all__ = ["MANIFEST", "Manifest", "RankFile", "SliceEntry", "manifest_bytes", "rank_file", "read_manifest"]

MANIFEST = "manifest.json"

_FORMAT = "thinwire checkpoint"
_VERSION = 2


def rank_file(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class SliceEntry:
    """Where elements `start` to `start + numel` of a parameter in one of its roles are: under `key` in `file`."""

    kind: str
    name: str
    start: int
    numel: int
    dtype: str
    file: str
    key: str


@dataclass(frozen=True)
class RankFile:
    """One rank's file: `size` in bytes, `sha256`, what is in it, and the JSON values that belong to the rank.

    `rank_tensors` and `buffers` map names to keys in the file.
    """

    name: str
    size: int
    sha256: str
    slices: list[SliceEntry]
    rank_tensors: dict[str, str]
    buffers: dict[str, str]
    values: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RankFile:
        """The inverse of `to_json`."""
        return cls(**{**value, "slices": [SliceEntry(**entry) for entry in value["slices"]]})


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's content. `serial` grows by one with every save of a folder; `files` has one entry a rank."""

    tag: str
    serial: int
    model: ModelDescription
    files: list[RankFile]
    shared: dict[str, Any]

    @property
    def world_size(self) -> int:
        """Ranks of the job that saved."""
        return len(self.files)

    @property
    def slices(self) -> list[SliceEntry]:
        """Those of all ranks."""
        return [entry for file in self.files for entry in file.slices]

    def encode(self) -> bytes:
        """The file's content."""
        body = {
            "format": _FORMAT,
            "version": _VERSION,
            "tag": self.tag,
            "serial": self.serial,
            "world_size": self.world_size,
            "shared": self.shared,
            "model": self.model.to_json(),
            "files": [file.to_json() for file in self.files],
        }
        return _sealed(json.loads(json.dumps(body)))

    @classmethod
    def decode(cls, content: bytes) -> Manifest:
        """The inverse of `encode`. Raises CheckpointError for anything that `encode` did not write."""
        body = _unsealed(content)
        try:
            manifest = cls(
                body["tag"],
                body["serial"],
                ModelDescription.from_json(body["model"]),
                [RankFile.from_json(file) for file in body["files"]],
                body["shared"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{MANIFEST} lacks what its version has: {error}") from error
        for rank, file in enumerate(manifest.files):
            # Names from a file must not lead out of its folder.
            if {file.name, *(entry.file for entry in file.slices)} != {rank_file(rank)}:
                raise CheckpointError(f"{MANIFEST} does not name one file a rank, {rank_file(rank)} for rank {rank}")
        return manifest

    def incompleteness(self) -> str | None:
        """What is wrong with the slices, where they are not every parameter exactly once."""
        groups: dict[tuple[str, str], list[SliceEntry]] = defaultdict(list)
        for entry in self.slices:
            if entry.name not in self.model.parameters:
                return f"there is a {entry.kind} of {entry.name!r}, which is no parameter"
            groups[entry.kind, entry.name].append(entry)
        for (kind, name), entries in groups.items():
            problem = _fault(entries, values_of_kind(self.model, kind, name))
            if problem:
                return f"{kind} of {name!r}: {problem}"
        for name in self.model.parameters:
            if self.model.numel(name) and not groups.keys() & {("weight", name), ("master", name)}:
                return f"no rank gave a weight of {name!r}"
        return None


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a checkpoint's own folder. Raises CheckpointError, naming the file and what is wrong with it."""
    return Manifest.decode(manifest_bytes(folder))


def manifest_bytes(folder: Path) -> bytes:
    """The content of the manifest's file. Raises CheckpointError where there is none to be read."""
    try:
        return (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from error


def _fault(entries: list[SliceEntry], whole: int) -> str | None:
    """The first gap, overlap or mixture of dtypes."""
    position = 0
    for entry in sorted((entry for entry in entries if entry.numel), key=lambda entry: entry.start):
        if entry.dtype != entries[0].dtype:
            return f"partly {entries[0].dtype}, partly {entry.dtype}"
        if entry.start > position:
            return f"elements {position} to {entry.start} are in no file"
        if entry.start < position:
            return f"elements {entry.start} to {min(position, entry.start + entry.numel)} are there twice"
        position += entry.numel
    if position > whole:
        return f"{position} elements, where the parameter has {whole}"
    return None if position == whole else f"elements {position} to {whole} are in no file"


def _sealed(body: dict[str, Any]) -> bytes:
    return _spelled({**body, "sha256": hashlib.sha256(_spelled(body)).hexdigest()})


def _unsealed(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged: {error}") from error
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise CheckpointError(f"{MANIFEST} is not one of a thinwire checkpoint, or it is damaged")
    if body.get("version") != _VERSION:
        raise CheckpointError(
            f"{MANIFEST} has version {body.get('version')!r}, this thinwire reads {_VERSION}: use the thinwire that "
            "wrote it, or it is damaged"
        )
    if content != _sealed({key: value for key, value in body.items() if key != "sha256"}):
        raise CheckpointError(f"{MANIFEST} is damaged: its content does not have the checksum that it carries")
    return body


def _spelled(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"
