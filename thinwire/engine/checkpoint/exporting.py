"""Weights for the world outside: state dicts in 16 bits, and model.safetensors of a whole checkpoint; and the commands
`thinwire checkpoint verify`, `inspect` and `export`, each of which returns the exit code.

The format, safetensors or torch.save's, follows from the name's ending; large ones go into several files with an index.
What is there stays until the new files are whole."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from thinwire.comm import Communicator, threads
from thinwire.engine.checkpoint.files import DTYPES, LazyTensor, dtype_name, sync_folder, write_tensors, write_whole
from thinwire.engine.checkpoint.loading import LoadedCheckpoint, candidates_to_load, examine
from thinwire.engine.checkpoint.manifest import MANIFEST, Candidate, Manifest
from thinwire.engine.checkpoint.store import CheckpointStore
from thinwire.engine.errors import CheckpointError, UsageError, printable

_SAFETENSORS = ".safetensors"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def file_size(given: int | str | None) -> int | None:
    """Bytes of "5GB", "200 MiB" or a number; None for no limit. Raises ValueError or TypeError for what is no size."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | str):
        raise TypeError(f"a file's largest size is a number of bytes, or a text such as '5GB', got {given!r}")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(given))
    unit = match[2].upper() if match else ""
    size = int(float(match[1]) * _UNITS[unit]) if match and unit in _UNITS else 0
    if size < 1:
        raise ValueError(f"a file's largest size is a number of bytes, or a text such as '5GB', got {given!r}")
    return size


def write_state_dict(
    folder: Path,
    filename: str,
    tensors: Mapping[str, Tensor | LazyTensor],
    same: Mapping[str, str],
    largest: int | None = None,
) -> list[Path]:
    """Write `tensors` to `folder`/`filename`, and return the paths of what was written.

    Above `largest` bytes they go into several files, `filename`'s stem with -00001-of-00003 and so on, and
    `filename`.index.json says which holds what, as in Hugging Face's models. One file's tensors are in memory at a
    time, one tensor's where the name ends with .safetensors.

    `same`: further names of tensors -> the one in `tensors`. torch.save keeps them one tensor; safetensors, which knows
    no tensor with two names, gets a copy.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: one.nbytes for name, one in tensors.items()}
    if filename.endswith(_SAFETENSORS):
        for target in same.values():
            sizes[target] += tensors[target].nbytes
    parts = _divided(sizes, largest)
    stem, ending = os.path.splitext(filename)
    names = [filename]
    if len(parts) > 1:
        names = [f"{stem}-{number:05d}-of-{len(parts):05d}{ending}" for number in range(1, len(parts) + 1)]
    place: dict[str, str] = {}
    for name, part in zip(names, parts, strict=True):
        aliases = {alias: target for alias, target in same.items() if target in part}
        _replace(folder / name, {key: tensors[key] for key in part}, aliases)
        place |= dict.fromkeys([*part, *aliases], name)
    written = [folder / name for name in names]
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(place.items()))}
        written.append(folder / f"{filename}.index.json")
        write_whole(written[-1], json.dumps(index, indent=2).encode() + b"\n")
    sync_folder(folder)
    return written


def _divided(sizes: Mapping[str, int], largest: int | None) -> list[list[str]]:
    """The names, in their order, in runs of at most `largest` bytes, or of one tensor that is larger."""
    parts: list[list[str]] = [[]]
    sum_of_part = 0
    for name, size in sizes.items():
        if largest is not None and parts[-1] and sum_of_part + size > largest:
            parts.append([])
            sum_of_part = 0
        parts[-1].append(name)
        sum_of_part += size
    return parts


@torch.no_grad()
def _replace(path: Path, tensors: Mapping[str, Tensor | LazyTensor], same: Mapping[str, str]) -> None:
    with replaced(path) as unfinished:
        if path.suffix == _SAFETENSORS:
            write_tensors(unfinished, {**tensors, **{alias: tensors[name] for alias, name in same.items()}})
        else:
            values: dict[str, Tensor] = {}
            for name, one in tensors.items():
                tensor = one.contiguous().detach().cpu().reshape(one.shape)
                # torch.save writes the whole memory that a view is of.
                values[name] = tensor if tensor.untyped_storage().nbytes() == one.nbytes else tensor.clone()
            save_new(unfinished, values | {alias: values[name] for alias, name in same.items()})


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Where to write a file that then takes the place of `path`, or leaves nothing if that fails. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    unfinished.unlink(missing_ok=True)  # of a process of the same number that was killed
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def save_new(path: Path, values: Mapping[str, Any]) -> None:
    """torch.save to a file that is not there yet, and have it reach the disk. Raises OSError."""
    with open(path, "xb") as file:
        torch.save(values, file)
        file.flush()
        os.fsync(file.fileno())


_LARGEST_FILE = 50 * 10**9


def write_weights(path: Path, tensors: Mapping[str, Tensor], tied: Mapping[str, str], comm: Communicator) -> bool:
    """Rank 0 writes its `tensors` under the name `path`; whether that went well, on every rank. Collective.

    fp32 values become bf16. A name that ends with .safetensors asks for that format, which leaves tied names out, as
    safetensors.torch.save_model does; any other for torch.save's. Above 50 GB there are several files, with an index.
    """
    problem = b""
    if comm.rank == 0:
        same = {} if path.suffix == _SAFETENSORS else {alias: name for alias, name in tied.items() if name in tensors}
        try:
            halves = {name: in_16_bits(tensor) for name, tensor in tensors.items()}
            write_state_dict(path.parent, path.name, halves, same, _LARGEST_FILE)
        except (OSError, RuntimeError) as error:  # torch.save has RuntimeError for a full disk
            problem = f"{getattr(error, 'strerror', None) or error}".encode()
            warnings.warn(
                f"the model could not be written to {path}: {problem.decode()}. A file that was there before stays",
                RuntimeWarning,
                stacklevel=4,
            )
    return not comm.all_gather_bytes(problem, "export weights")[0]


def in_16_bits(tensor: Tensor) -> Tensor:
    """What is written of a tensor: of fp32 and fp64 values bf16, all others as they are."""
    return tensor.bfloat16() if tensor.dtype in (torch.float32, torch.float64) else tensor


WEIGHTS = "model.safetensors"


def export_weights(
    checkpoint: LoadedCheckpoint,
    output: Path,
    dtype: torch.dtype | None = None,
    config: Path | None = None,
    tied: bool = False,
) -> Path:
    """Write `output`/model.safetensors, replacing one that is there, and return its path. One parameter at a time.

    Args:
        checkpoint: its fp32 master weights are written where there are any, else its weights, and its buffers.
        output: a folder, made if need be.
        dtype: what floating-point values are converted to; by default they stay as they are.
        config: a file to copy to `output`/config.json, which from_pretrained needs.
        tied: write a tied parameter again under its other names, for load_state_dict(strict=True). from_pretrained and
            safetensors.torch.load_model tie by themselves and expect it once.

    Raises OSError.
    """
    same = checkpoint.shared.get("tied", {}) if tied else {}
    described = None if config is None else config.read_bytes()
    (path,) = write_state_dict(output, WEIGHTS, lazy_weights(checkpoint, dtype), same)
    if described is not None:
        write_whole(output / "config.json", described)
    return path


def lazy_weights(checkpoint: LoadedCheckpoint, dtype: torch.dtype | None) -> dict[str, LazyTensor]:
    """Buffers and parameters, fp32 master weights where there are any; floating-point values converted to `dtype`."""

    def lazy(own: torch.dtype, shape: tuple[int, ...], read: Callable[[], Tensor]) -> LazyTensor:
        wanted = dtype if dtype is not None and own.is_floating_point else own
        return LazyTensor(wanted, shape, lambda: read().to(wanted).view(shape))

    found = {name: lazy(one.dtype, tuple(one.shape), one.detach) for name, one in checkpoint.buffers().items()}
    for name, (shape, own) in checkpoint.model.parameters.items():
        kind = "master" if checkpoint.dtype_of("master", name) else "weight"
        held = checkpoint.dtype_of(kind, name) or own  # an empty parameter is in no file
        found[name] = lazy(held, shape, partial(checkpoint.read, kind, name, 0, checkpoint.model.numel(name)))
    return found


# The commands


_WHOLE, _DAMAGED = 0, 1
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ALONE_SECONDS = 300.0


def verify(arguments: argparse.Namespace) -> int:
    """Read every byte of the checkpoints, and say which are whole and what is wrong with the others."""
    candidates = _candidates(arguments)
    exit_code = _WHOLE
    for candidate in candidates:
        problems = examine(candidate.path).problems
        for told in problems or ["whole"]:
            say(f"{candidate.path.name}: {told}")
        if problems:
            exit_code = _DAMAGED
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
    rows: dict[str, Any] = {
        "tag": description["tag"],
        "path": description["path"],
        "step": "unknown" if description["step"] is None else description["step"],
        "world size": description["world_size"],
        "parameters": f"{parameters['tensors']} tensors, {parameters['elements']:,} elements, {dtypes}",
        **{f"kind {kind}": f"{size:,} bytes" for kind, size in description["bytes_of_kind"].items()},
        "buffers": ", ".join(description["buffers"]) or "none",
        "of each rank": ", ".join(description["rank_tensors"]) or "none",
        **{file: f"{size:,} bytes" for file, size in description["files"].items()},
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def state_dict_of(found: LoadedCheckpoint) -> dict[str, Tensor]:
    """Weights and buffers as a model's state_dict has them, tied names too."""
    tensors = {
        name: found.read("weight", name, 0, found.model.numel(name)).view(shape)
        for name, (shape, _) in found.model.parameters.items()
    }
    tensors |= {alias: tensors[name] for alias, name in found.shared.get("tied", {}).items() if name in tensors}
    return tensors | found.buffers()
