"""`thinwire checkpoint`: look at checkpoints, check them and take the weights out, with no job running."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from thinwire.comm import threads
from thinwire.engine.checkpoint.errors import CheckpointError
from thinwire.engine.checkpoint.exporting import WEIGHTS, export_weights
from thinwire.engine.checkpoint.folder import Candidate, CheckpointFolder
from thinwire.engine.checkpoint.manifest import MANIFEST, Manifest
from thinwire.engine.checkpoint.store import CheckpointStore
from thinwire.engine.checkpoint.tensor_file import dtype_from_name, dtype_name
from thinwire.engine.checkpoint.verification import examine

__all__ = ["UsageError", "add_commands"]

_WHOLE, _DAMAGED = 0, 1
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ALONE_SECONDS = 300.0


class UsageError(Exception):
    """What was asked for is not there, or cannot be done; exit code 2."""


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add verify, inspect and export; each sets `run`, a function of the arguments that returns the exit code."""
    commands = parser.add_subparsers(required=True, metavar="verify|inspect|export")
    verify = commands.add_parser("verify", help="read every byte; exit code 0 whole, 1 damaged, 2 no checkpoint")
    verify.set_defaults(run=_verify)
    inspect = commands.add_parser("inspect", help="say what a checkpoint holds")
    inspect.add_argument("--json", action="store_true", help="for other programs")
    inspect.set_defaults(run=_inspect)
    export = commands.add_parser("export", help=f"write {WEIGHTS} for Hugging Face and plain torch")
    for command, without_tag in ((verify, "all of them"), (inspect, "the newest"), (export, "the newest whole one")):
        command.add_argument("folder", metavar="DIR", type=Path, help="the folder that holds the checkpoints")
        command.add_argument("--tag", help=f"which checkpoint; by default {without_tag}")
    export.add_argument("output", metavar="OUTPUT", type=Path, help="the folder to write to")
    export.add_argument("--dtype", choices=_DTYPES, help="convert floating-point values; by default masters, if any")
    export.add_argument("--config", type=Path, help="a file to copy to OUTPUT/config.json, for from_pretrained")
    export.add_argument("--tied", action="store_true", help="write tied parameters under each of their names")
    export.set_defaults(run=_export)


def _verify(arguments: argparse.Namespace) -> int:
    candidates = _candidates(arguments)
    exit_code = _WHOLE
    for candidate in candidates:
        problems = examine(candidate.path).problems
        for problem in problems:
            print(f"{candidate.path.name}: {problem}")
        if problems:
            exit_code = _DAMAGED
        else:
            print(f"{candidate.path.name}: whole")
    return exit_code


def _inspect(arguments: argparse.Namespace) -> int:
    candidate = _candidates(arguments)[0]
    if candidate.manifest is None:
        print(f"{candidate.path.name}: {examine(candidate.path).problems[0]}", file=sys.stderr)
        return _DAMAGED
    description = _describe(candidate.path, candidate.manifest)
    print(json.dumps(description, indent=1) if arguments.json else _in_words(description))
    return _WHOLE


def _export(arguments: argparse.Namespace) -> int:
    _candidates(arguments)
    if arguments.config is not None and not arguments.config.is_file():
        raise UsageError(f"--config {arguments.config} is not a file")
    with warnings.catch_warnings(record=True) as fallbacks:
        warnings.simplefilter("always")
        checkpoint = CheckpointStore(arguments.folder, threads.single(_ALONE_SECONDS)).load(arguments.tag)
    for fallback in fallbacks:
        print(f"thinwire: {fallback.message}", file=sys.stderr)
    assert checkpoint is not None
    with checkpoint:
        dtype = _DTYPES[arguments.dtype] if arguments.dtype else None
        path = export_weights(checkpoint, arguments.output, dtype, arguments.config, arguments.tied)
    print(f"{path}: the weights of {checkpoint.tag}, {path.stat().st_size} bytes")
    return _WHOLE


def _candidates(arguments: argparse.Namespace) -> list[Candidate]:
    folder: Path = arguments.folder
    if (folder / MANIFEST).exists():
        raise UsageError(f"{folder} is one checkpoint: give {folder.absolute().parent} --tag {folder.absolute().name}")
    checkpoints = CheckpointFolder(folder)
    try:
        if arguments.tag is not None:
            checkpoints.refuse_pickle(arguments.tag)
        candidates = checkpoints.candidates()
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
    for entry in manifest.pieces:
        kinds[entry.kind] += entry.numel * dtype_from_name(entry.dtype).itemsize
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
        "buffers": sorted(manifest.parts[0].buffers),
        "rank_tensors": sorted({key for part in manifest.parts for key in part.rank_tensors}),
        "files": {part.file: part.size for part in manifest.parts},
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
