"""Whether a checkpoint is whole: every file there, every byte as it was written, every parameter exactly once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from thinwire.engine.checkpoint.errors import CheckpointError
from thinwire.engine.checkpoint.manifest import MANIFEST, Manifest, RankFile, manifest_bytes
from thinwire.engine.checkpoint.pickles import is_pickle
from thinwire.engine.checkpoint.tensor_file import CODES, dtype_from_name

__all__ = ["Examination", "examine"]


@dataclass(frozen=True)
class Examination:
    """What was found: problems, each naming a file, and where the manifest could be read what it says.

    `digest` is the sha256 of the manifest's file.
    """

    manifest: Manifest | None
    digest: str
    problems: list[str]


def examine(path: Path, rank: int = 0, world_size: int = 1) -> Examination:
    """Read the manifest of the checkpoint in `path`, and every `world_size`th of its files from `rank` on."""
    try:
        content = manifest_bytes(path)
        manifest = Manifest.decode(content)
    except CheckpointError as error:
        pickle = ", and it is a pickle" if is_pickle(path / MANIFEST) else ""
        return Examination(None, "", [f"{error}{pickle}"])
    problem = manifest.incompleteness()
    problems = [f"{MANIFEST}: {problem}"] if problem else _problems(path, manifest.files[rank::world_size])
    return Examination(manifest, hashlib.sha256(content).hexdigest(), problems)


def _problems(path: Path, files: Sequence[RankFile]) -> list[str]:
    return [f"{file.name} {problem}" for file in files if (problem := _problem(path / file.name, file))]


def _problem(path: Path, file: RankFile) -> str | None:
    try:
        if not path.is_file():
            return "is missing" if not path.exists() else "is not a file"
        size = path.stat().st_size
        if size != file.size:
            return f"has {size} bytes, {file.size} were written{_if_pickle(path)}"
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != file.sha256:
            return f"is damaged: its content does not have the checksum of what was written{_if_pickle(path)}"
        return _problem_of_header(path, file)
    except OSError as error:
        return f"cannot be read: {error}"


def _if_pickle(path: Path) -> str:
    return "; it is a pickle, which thinwire never loads" if is_pickle(path) else ""


def _problem_of_header(path: Path, file: RankFile) -> str | None:
    try:
        with safe_open(path, framework="pt") as tensors:
            present = set(tensors.keys())
            expected = {*(entry.key for entry in file.slices), *file.rank_tensors.values(), *file.buffers.values()}
            if present != expected:
                return f"and the manifest differ on its tensors: {sorted(present ^ expected)[0]!r}"
            for entry in file.slices:
                held = tensors.get_slice(entry.key)
                if held.get_shape() != [entry.numel] or held.get_dtype() != CODES[dtype_from_name(entry.dtype)]:
                    return f"and the manifest differ on {entry.key!r}"
    except (SafetensorError, ValueError) as error:
        return f"is no safetensors file: {error}"
    return None
