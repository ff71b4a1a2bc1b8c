"""Weights for the world outside: state dicts in 16 bits, and model.safetensors of a whole checkpoint.

The format, safetensors or torch.save's, follows from the name's ending; large ones go into several files with an index.
What is there stays until the new files are whole."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.engine.checkpoint.files import LazyTensor, sync_folder, values_of, write_tensors, write_whole
from thinwire.engine.checkpoint.loading import LoadedCheckpoint

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


def _save(path: Path, tensors: Mapping[str, Tensor | LazyTensor], same: Mapping[str, str]) -> None:
    values: dict[str, Tensor] = {}
    for name, one in tensors.items():
        tensor = values_of(one).detach().cpu().reshape(one.shape)
        # torch.save writes the whole memory that a view is of.
        values[name] = tensor if tensor.untyped_storage().nbytes() == one.nbytes else tensor.clone()
    values |= {alias: values[name] for alias, name in same.items()}
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
