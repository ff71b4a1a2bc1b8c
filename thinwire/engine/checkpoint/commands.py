"""The commands `thinwire checkpoint verify`, `inspect` and `export`; each returns the exit code."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import torch

from thinwire.comm import threads
from thinwire.engine.checkpoint.exporting import export_weights
from thinwire.engine.checkpoint.files import DTYPES, dtype_name
from thinwire.engine.checkpoint.loading import LoadedCheckpoint, candidates_to_load, examine
from thinwire.engine.checkpoint.manifest import MANIFEST, Candidate, Manifest
from thinwire.engine.checkpoint.store import CheckpointStore
from thinwire.engine.errors import CheckpointError, UsageError, printable

_WHOLE, _DAMAGED = 0, 1
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ALONE_SECONDS = 300.0


def verify(arguments: argparse.Namespace) -> int:
    """Read every byte of the checkpoints, and say which are whole and what is wrong with the others."""
    candidates = _candidates(arguments)
    exit_code = _WHOLE
    for candidate in candidates:
        problems = examine(candidate.path).problems
        for problem in problems:
            say(f"{candidate.path.name}: {problem}")
        if problems:
            exit_code = _DAMAGED
        else:
            say(f"{candidate.path.name}: whole")
    return exit_code


def inspect(arguments: argparse.Namespace) -> int:
    """Say what a checkpoint holds, in words or as JSON."""
    candidate = _candidates(arguments)[0]
    if candidate.manifest is None:
        problems = examine(candidate.path).problems or ["it has changed meanwhile: look again"]
        say(f"{candidate.path.name}: {problems[0]}", file=sys.stderr)
        return _DAMAGED
    description = _describe(candidate.path, candidate.manifest)
    say(json.dumps(description, indent=1) if arguments.json else _in_words(description))
    return _WHOLE


def export(arguments: argparse.Namespace) -> int:
    """Write a checkpoint's weights to one file."""
    if arguments.config is not None and not arguments.config.is_file():
        raise UsageError(f"--config {arguments.config} is not a file")
    with open_to_export(arguments) as checkpoint:
        dtype = _DTYPES[arguments.dtype] if arguments.dtype else None
        path = export_weights(checkpoint, arguments.output, dtype, arguments.config, arguments.tied)
    say(f"{path}: the weights of {checkpoint.tag}, {path.stat().st_size} bytes")
    return _WHOLE


def open_to_export(arguments: argparse.Namespace) -> LoadedCheckpoint:
    """The checkpoint that is asked for, or else the newest whole one, saying why others are not.

    Raises UsageError if there is none.
    """
    _candidates(arguments)
    with warnings.catch_warnings(record=True) as fallbacks:
        warnings.simplefilter("always")
        checkpoint = CheckpointStore(arguments.folder, threads.single(_ALONE_SECONDS)).load(arguments.tag)
    for fallback in fallbacks:
        say(f"thinwire: {fallback.message}", file=sys.stderr)
    assert checkpoint is not None
    return checkpoint


def say(text: str, file: TextIO | None = None) -> None:
    """Print what may come from a file or a folder: escapes in it would be commands to the terminal."""
    print(printable(text), file=file or sys.stdout)


def _candidates(arguments: argparse.Namespace) -> list[Candidate]:
    folder: Path = arguments.folder
    if (folder / MANIFEST).exists():
        raise UsageError(f"{folder} is one checkpoint: give {folder.absolute().parent} --tag {folder.absolute().name}")
    try:
        candidates, _ = candidates_to_load(folder, arguments.tag)
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    if not candidates:
        raise UsageError(f"there is no checkpoint in {folder}")
    chosen = [one for one in candidates if arguments.tag in (None, one.tag)]
    if not chosen:
        raise UsageError(f"there is no checkpoint {arguments.tag!r}, only {', '.join(one.tag for one in candidates)}")
    return chosen


def _describe(path: Path, manifest: Manifest) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    for entry in manifest.slices:
        kinds[entry.kind] += entry.numel * DTYPES[entry.dtype].itemsize
    parameters = manifest.model.parameters
    return {
        "tag": manifest.tag,
        "path": str(path),
        "serial": manifest.serial,
        "step": manifest.shared.get("progress", {}).get("global_steps"),
        "world_size": manifest.world_size,
        "parameters": {
            "tensors": len(parameters),
            "elements": sum(manifest.model.numel(name) for name in parameters),
            "dtypes": sorted({dtype_name(dtype) for _, dtype in parameters.values()}),
        },
        "bytes_of_kind": dict(sorted(kinds.items())),
        "buffers": sorted(manifest.files[0].buffers),
        "rank_tensors": sorted({key for file in manifest.files for key in file.rank_tensors}),
        "files": {file.name: file.size for file in manifest.files},
    }


def _in_words(description: dict[str, Any]) -> str:
    parameters = description["parameters"]
    dtypes = ", ".join(parameters["dtypes"])
    step = "unknown" if description["step"] is None else description["step"]
    rows: list[tuple[str, Any]] = [
        ("tag", description["tag"]),
        ("path", description["path"]),
        ("step", step),
        ("world size", description["world_size"]),
        ("parameters", f"{parameters['tensors']} tensors, {parameters['elements']:,} elements, {dtypes}"),
    ]
    rows += [(f"kind {kind}", f"{size:,} bytes") for kind, size in description["bytes_of_kind"].items()]
    rows += [("buffers", ", ".join(description["buffers"]) or "none")]
    rows += [("of each rank", ", ".join(description["rank_tensors"]) or "none")]
    rows += [(file, f"{size:,} bytes") for file, size in description["files"].items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
