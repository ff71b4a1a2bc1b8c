"""Writes safetensors files one tensor at a time, hashing what it writes: a rank needs memory for one tensor instead of
a copy of all, a GPU's tensors go straight to the file, and a full disk is an OSError."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from thinwire.engine.checkpoint.regular_files import create_file

__all__ = ["CODES", "TensorToWrite", "bytes_of", "dtype_from_name", "dtype_name", "write_tensors"]

CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""What the safetensors format calls each dtype; the ones that a checkpoint can hold."""

_CHUNK_BYTES = 16 << 20
_ALIGNMENT = 8


def dtype_name(dtype: torch.dtype) -> str:
    """As torch spells it, without the module: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """The inverse of `dtype_name`. Raises ValueError for what a checkpoint cannot hold."""
    for dtype in CODES:
        if dtype_name(dtype) == name:
            return dtype
    raise ValueError(f"no tensor of dtype {name!r} can be in a checkpoint")


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor's dtype and shape, known now, and its values, asked for when their turn comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorToWrite:
        """A tensor that exists already, on any device."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def nbytes(self) -> int:
        """Length of its values in the file."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, TensorToWrite]) -> tuple[int, str]:
    """Write a new safetensors file, and wait until the disk has it. Returns its size in bytes and its sha256.

    Raises OSError, FileExistsError included.
    """
    # Descending element sizes keep every tensor aligned, as the format's own writer does.
    order = sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize)
    digest = hashlib.sha256()
    size = 0
    with os.fdopen(create_file(path), "wb") as file:
        for chunk in _content(tensors, order):
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's values, in row-major order, as bytes in CPU memory."""
    here = tensor.detach().cpu().contiguous()
    # Not view(-1): a contiguous tensor of one element may have any stride, which byte views refuse.
    flat = here.as_strided((here.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _content(tensors: Mapping[str, TensorToWrite], order: list[str]) -> Iterator[bytes | memoryview]:
    yield _header(tensors, order)
    for key in order:
        view = bytes_of(tensors[key].values())
        for start in range(0, len(view), _CHUNK_BYTES):
            yield view[start : start + _CHUNK_BYTES]


def _header(tensors: Mapping[str, TensorToWrite], order: list[str]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key in order:
        tensor = tensors[key]
        table[key] = {
            "dtype": CODES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
