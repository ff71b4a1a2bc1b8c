"""A checkpoint's manifest: which file holds which run of which parameter, and every file's checksum.

The same models write it, read it and check it. It carries its own checksum, and its bytes are the only ones that spell
its content, so no flipped bit goes unseen.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, GetCoreSchemaHandler, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as saved
from pydantic_core import CoreSchema, core_schema
from torch import Tensor
from typing_extensions import TypedDict

from thinwire.comm.errors import first_fault
from thinwire.engine.checkpoint.files import DTYPES, NotAFileError, dtype_name, read_file
from thinwire.engine.checkpoint.regions import fault_of_regions
from thinwire.engine.errors import CheckpointError
from thinwire.zero import SavedSlice

MANIFEST = "manifest.json"
LATEST = "latest"

_FORMAT = "thinwire checkpoint"
_VERSION = 3
_VERSION_WITHOUT_RUN = 2
# A job of thousands of ranks needs some 100 MB: its ranks' random generators and the names of their residuals.
_MOST_BYTES = 1 << 30

# Nothing is converted.
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
Text = Annotated[str, Strict()]
Dtype = Annotated[str, Field(strict=True, pattern=f"^({'|'.join(DTYPES)})$")]


class _Parameter(TypedDict):
    shape: list[Count]
    dtype: Dtype


def _in_words(parameter: tuple[tuple[int, ...], torch.dtype]) -> str:
    shape, dtype = parameter
    return f"{dtype_name(dtype)} of shape {shape}"


@dataclass(frozen=True)
class ModelDescription:
    """Shape and dtype of every parameter, in the model's order."""

    parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    @classmethod
    def of(cls, named_parameters: Iterable[tuple[str, Tensor]]) -> ModelDescription:
        """The description of `model.named_parameters()`."""
        return cls({name: (tuple(parameter.shape), parameter.dtype) for name, parameter in named_parameters})

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            name: {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
            for name, (shape, dtype) in self.parameters.items()
        }

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        def to_saved(value: object) -> object:
            return value.to_json() if isinstance(value, cls) else value

        def of_saved(saved: dict[str, _Parameter]) -> ModelDescription:
            return cls({name: (tuple(one["shape"]), DTYPES[one["dtype"]]) for name, one in saved.items()})

        saved = core_schema.no_info_after_validator_function(of_saved, handler.generate_schema(dict[Text, _Parameter]))
        as_json = core_schema.plain_serializer_function_ser_schema(cls.to_json)
        return core_schema.no_info_before_validator_function(to_saved, saved, serialization=as_json)

    def numel(self, name: str, kind: str = "weight") -> int:
        """Elements of one parameter; values that its slices of another kind hold together."""
        return 1 if kind.startswith("scalar.") else math.prod(self.parameters[name][0])

    def check_slices(self, slices: list[SavedSlice]) -> None:
        """Raise ValueError for slices that are not runs of its parameters, each once."""
        for one in slices:
            what = f"slice {one.kind!r} of {one.name!r} at {one.start}"
            if not one.kind or "/" in one.kind:
                raise ValueError(f"{what}: a kind is a word without '/'")
            if one.name not in self.parameters:
                raise ValueError(f"{what}: the model has no parameter of that name")
            if one.tensor.dim() != 1 or not one.tensor.is_contiguous():
                shape = tuple(one.tensor.shape)
                raise ValueError(f"{what} must be one-dimensional and contiguous, got shape {shape}: give a flat view")
            end, whole = one.start + one.tensor.numel(), self.numel(one.name, one.kind)
            if not 0 <= one.start <= end <= whole:
                raise ValueError(f"{what} ends at {end}, but there are {whole} values")
        places = {(one.kind, one.name, one.start) for one in slices}
        if len(places) < len(slices):
            raise ValueError(f"{len(slices)} slices begin at {len(places)} places: give each run of values once")

    def difference_to(self, saved: ModelDescription) -> str | None:
        """The first parameter that a checkpoint of `saved` cannot fill, or None where all agree."""
        for name, mine in self.parameters.items():
            theirs = saved.parameters.get(name)
            if theirs is None:
                return f"parameter {name!r}, {_in_words(mine)}, is not in it"
            if mine != theirs:
                return f"parameter {name!r} is {_in_words(theirs)} in it and {_in_words(mine)} in this model"
        for name, theirs in saved.parameters.items():
            if name not in self.parameters:
                return f"parameter {name!r}, {_in_words(theirs)}, is in it and not in this model"
        return None


def rank_file(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


SLICE_KEY, RANK_KEY, BUFFER_KEY = "slice/{}/{}/{}", "rank/{}", "buffer/{}"
"""The keys, in a rank's file, of a slice by kind, name and start, and of the rank's own tensors and buffers by name."""


@saved(frozen=True)
class SliceEntry:
    """Where elements `start` to `start + numel` of a parameter in one of its roles are: under `key` in `file`."""

    kind: Text
    name: Text
    start: Count
    numel: Count
    dtype: Dtype
    file: Text
    key: Text


@saved(frozen=True)
class RankFile:
    """One rank's file: `size` in bytes, `sha256`, what is in it, and the JSON values that belong to the rank.

    `rank_tensors` and `buffers` map names to keys in the file.
    """

    name: Text
    size: Count
    sha256: Text
    slices: list[SliceEntry]
    rank_tensors: dict[Text, Text]
    buffers: dict[Text, Text]
    values: dict[Any, Any]

    def check(self, name: str) -> None:
        """Raise CheckpointError for what is in another file than that of its rank, `name`, or lies there under the key
        of something else: it is not what it is called."""
        if self.name != name:
            raise CheckpointError(f"{MANIFEST} does not name one file a rank: {self.name!r} in place of {name}")
        for one in self.slices:
            if one.file != name:  # names from a file must not lead out of its folder
                raise CheckpointError(f"{MANIFEST} does not name one file a rank: {one.file!r} in that of {name}")
            if one.key != SLICE_KEY.format(one.kind, one.name, one.start):
                raise CheckpointError(f"{MANIFEST} has {one.key!r} of {name} for {one.kind} of {one.name!r}")
        for form, keys in ((RANK_KEY, self.rank_tensors), (BUFFER_KEY, self.buffers)):
            for called, key in keys.items():
                if key != form.format(called):
                    raise CheckpointError(f"{MANIFEST} has {key!r} of {name} for {called!r}")


@saved(frozen=True)
class Run:
    """The job that saved a checkpoint, under a `name` drawn at random.

    `ancestors`: jobs before it that it is the continuation of -> the serial of the checkpoint that it went on from.
    """

    name: Text
    ancestors: dict[Text, Count]

    def wrote(self, manifest: Manifest) -> bool:
        """Whether this job has saved it, or one that it continues, no later than where it went on."""
        other = manifest.run.name
        return bool(other) and (other == self.name or manifest.serial <= self.ancestors.get(other, 0))

    def going_on_from(self, manifest: Manifest) -> Run:
        """The same job, now the continuation of the one that saved this."""
        inherited = {**manifest.run.ancestors, manifest.run.name: manifest.serial}
        return Run(self.name, {**self.ancestors, **inherited})


@saved(frozen=True)
class Manifest:
    """A checkpoint's content. `serial` grows by one with every save of a folder; `files` has one entry a rank."""

    tag: Text
    serial: Annotated[Count, Field(ge=1)]
    run: Run
    model: ModelDescription
    files: Annotated[list[RankFile], Field(min_length=1)]
    shared: dict[Any, Any]

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
        head = {"format": _FORMAT, "version": _VERSION, "world_size": self.world_size}
        return _sealed(json.loads(json.dumps(head | _MANIFEST.dump_python(self))))

    @classmethod
    def decode(cls, content: bytes) -> Manifest:
        """The inverse of `encode`. Raises CheckpointError for anything that `encode` did not write."""
        body = _unsealed(content)
        if body["version"] == _VERSION_WITHOUT_RUN:
            body.setdefault("run", {"name": "", "ancestors": {}})
        whole = ""
        try:
            manifest = _MANIFEST.validate_python(body)
            whole = "shared"
            _SHARED.validate_python(manifest.shared)
        except ValidationError as error:
            raise CheckpointError(
                f"{MANIFEST} does not hold what its version has: {first_fault(error, whole)}"
            ) from None
        if body.get("world_size") != manifest.world_size:
            raise CheckpointError(
                f"{MANIFEST} is of {body.get('world_size')!r} ranks and has files of {manifest.world_size}"
            )
        for rank, file in enumerate(manifest.files):
            file.check(rank_file(rank))
        return manifest

    def incompleteness(self) -> str | None:
        """What is wrong with the slices, where they are not every parameter exactly once."""
        groups: dict[tuple[str, str], list[SliceEntry]] = defaultdict(list)
        for entry in self.slices:
            if entry.name not in self.model.parameters:
                return f"there is a {entry.kind} of {entry.name!r}, which is no parameter"
            groups[entry.kind, entry.name].append(entry)
        for (kind, name), entries in groups.items():
            if problem := _fault(entries, self.model.numel(name, kind)):
                return f"{kind} of {name!r}: {problem}"
        for name in filter(self.model.numel, self.model.parameters):
            if not groups.keys() & {("weight", name), ("master", name)}:
                return f"no rank gave a weight of {name!r}"
        for alias, name in self.shared.get("tied", {}).items():
            if alias in self.model.parameters or name not in self.model.parameters:
                what = f"shared.tied has {alias!r} as another name of {name!r}"
                return f"{what}: the first must be none, the second a parameter"
        whole = {"mesh", "cuts"}.isdisjoint(self.shared)
        return None if whole else fault_of_regions(self.shared, self.model.parameters, self.world_size)


class _Shared(TypedDict, total=False):
    """What weights are exported and described by; who takes up the rest checks it."""

    tied: dict[Text, Text]
    frozen: list[Text]
    progress: dict[Text, Any]
    mesh: dict[Literal["pp", "dp", "tp"], Count]
    cuts: dict[Text, tuple[Count, Count, Count]]


_MANIFEST = TypeAdapter(Manifest)
_SHARED = TypeAdapter(_Shared)
RANK_FILE = TypeAdapter(RankFile)
"""A rank's entry as plain values, and back."""


def manifest_bytes(path: Path, folder: int | None = None) -> bytes:
    """The content of the manifest in the folder `path`, opened through the descriptor `folder` where that is given.

    Raises CheckpointError where there is none to be read.
    """
    try:
        return read_file(path / MANIFEST if folder is None else MANIFEST, _MOST_BYTES, folder)
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except NotAFileError:
        raise CheckpointError(f"{MANIFEST} is not a file") from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from error


_RANK_FILE = re.compile(r"rank-.*\.safetensors", re.DOTALL)
# A folder's name while a save is in flight or being undone; the hexadecimal number is the save's own.
HIDDEN = re.compile(r"\.(?P<tag>.+)\.[0-9a-f]{8}\.(?P<state>partial|replaced|removed)(\.unfinished)?", re.DOTALL)

_LONGEST_TAG = 200


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

    @classmethod
    def at(cls, path: Path, tag: str) -> Candidate:
        """What lies at `path` as the checkpoint `tag`."""
        try:
            return cls(tag, path, Manifest.decode(manifest_bytes(path)))
        except CheckpointError:
            return cls(tag, path, None)


def find_candidates(folder: Path) -> list[Candidate]:
    """What a folder of checkpoints holds, the newest first, and before them what may be newer and cannot be read."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        hidden = HIDDEN.fullmatch(path.name)
        if hidden and hidden["state"] == "replaced" and not (folder / hidden["tag"]).exists():
            found.append(Candidate.at(path, hidden["tag"]))
        elif not path.name.startswith(".") and looks_like_checkpoint(path):
            found.append(Candidate.at(path, path.name))
    return sorted(found, key=lambda one: one.manifest.serial if one.manifest else math.inf, reverse=True)


def looks_like_checkpoint(path: Path) -> bool:
    """Whether it is a folder with a file of a checkpoint in it."""
    try:
        return any(name == MANIFEST or _RANK_FILE.fullmatch(name) for name in os.listdir(path))
    except OSError:
        return False


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
    if body.get("version") not in (_VERSION_WITHOUT_RUN, _VERSION):
        raise CheckpointError(
            f"{MANIFEST} has version {body.get('version')!r}, this thinwire reads {_VERSION_WITHOUT_RUN} and "
            f"{_VERSION}: use the thinwire that wrote it, or it is damaged"
        )
    if content != _sealed({key: value for key, value in body.items() if key != "sha256"}):
        raise CheckpointError(f"{MANIFEST} is damaged: its content does not have the checksum that it carries")
    return body


def _spelled(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"
