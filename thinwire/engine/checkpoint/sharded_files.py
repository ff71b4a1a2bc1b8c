"""State dicts as files that the rest of the world reads, safetensors or torch.save by the name's ending, in several
with an index where they are large; what is there stays until the new ones are whole."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from thinwire.engine.checkpoint.durable import sync_folder, write_whole
from thinwire.engine.checkpoint.tensor_file import TensorToWrite, write_tensors

__all__ = ["file_size", "write_state_dict"]

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
    tensors: Mapping[str, TensorToWrite],
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
def _replace(path: Path, tensors: Mapping[str, TensorToWrite], same: Mapping[str, str]) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    unfinished.unlink(missing_ok=True)  # of a process of the same number that was killed
    try:
        if path.suffix == _SAFETENSORS:
            write_tensors(unfinished, {**tensors, **{alias: tensors[name] for alias, name in same.items()}})
        else:
            _save(unfinished, tensors, same)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _save(path: Path, tensors: Mapping[str, TensorToWrite], same: Mapping[str, str]) -> None:
    values: dict[str, Tensor] = {}
    for name, one in tensors.items():
        tensor = one.values().detach().cpu().reshape(one.shape)
        # torch.save writes the whole memory that a view is of.
        values[name] = tensor if tensor.untyped_storage().nbytes() == one.nbytes else tensor.clone()
    values |= {alias: values[name] for alias, name in same.items()}
    with open(path, "xb") as file:
        torch.save(values, file)
        file.flush()
        os.fsync(file.fileno())
