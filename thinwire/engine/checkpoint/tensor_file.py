"""Safetensors files, written one tensor at a time and read by offset through a descriptor.

Writing hashes what it writes: a rank needs memory for one tensor instead of a copy of all, a GPU's tensors go
straight to the file, and a full disk is an OSError. Reading goes through one descriptor from the checksum to the last
value: what was verified is what is read, whatever happens to the file's name, and a file that was cut short is an
error and no crash, as with a map of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from thinwire.engine.checkpoint.files import create_file

__all__ = [
    "CODES",
    "StoredTensor",
    "TensorReader",
    "TensorToWrite",
    "bytes_of",
    "checksum",
    "dtype_from_name",
    "dtype_name",
    "write_tensors",
]

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
"""Names of the safetensors format for each dtype that a checkpoint can hold."""

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


_DTYPES = {code: dtype for dtype, code in CODES.items()}
_MOST_HEADER_BYTES = 100_000_000  # as in the format's own reader
_LENGTH_BYTES = 8
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `offset` of its first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


class TensorReader:
    """The tensors of one safetensors file, read by a descriptor that its caller opens and closes.

    Raises ValueError for what is no safetensors file, OSError where it cannot be read.
    """

    def __init__(self, descriptor: int) -> None:
        length = int.from_bytes(_read(descriptor, 0, _LENGTH_BYTES), "little")
        first, end = _LENGTH_BYTES + length, os.fstat(descriptor).st_size
        if first > end or length > _MOST_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes, more than the file or the format allows")
        try:
            table = json.loads(_read(descriptor, _LENGTH_BYTES, length))
        except RecursionError as error:
            raise ValueError("its header is nested too deeply") from error
        if not isinstance(table, dict):
            raise ValueError("its header is no table")
        table.pop("__metadata__", None)
        self.tensors = {key: _stored(key, entry, first, end) for key, entry in table.items()}

    def run(self, descriptor: int, key: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of a tensor, one-dimensional. Raises OSError, KeyError."""
        stored = self.tensors[key]
        values = torch.empty(stop - start, dtype=stored.dtype)
        _read_into(descriptor, stored.offset + start * stored.dtype.itemsize, values)
        return values

    def whole(self, descriptor: int, key: str) -> Tensor:
        """A tensor in its own shape. Raises OSError, KeyError."""
        stored = self.tensors[key]
        return self.run(descriptor, key, 0, stored.numel).reshape(stored.shape)


def checksum(descriptor: int) -> str:
    """The sha256 of a whole file. Raises OSError."""
    digest = hashlib.sha256()
    offset = 0
    while chunk := os.pread(descriptor, _READ_BYTES, offset):
        digest.update(chunk)
        offset += len(chunk)
    return digest.hexdigest()


def _stored(key: str, entry: object, first: int, end: int) -> StoredTensor:
    """What the header says of one tensor, whose bytes lie between `first` and `end`."""
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(low), int(high)]} if code in _DTYPES:
            stored = StoredTensor(_DTYPES[code], tuple(shape), first + low)
            whole = all(type(size) is int and size >= 0 for size in shape) and 0 <= low <= high <= end - first
            if whole and high - low == stored.numel * stored.dtype.itemsize:
                return stored
    raise ValueError(f"its header does not say where {key!r} is")


def _read(descriptor: int, offset: int, length: int) -> bytes:
    content = torch.empty(length, dtype=torch.uint8)
    _read_into(descriptor, offset, content)
    return content.numpy().tobytes()


def _read_into(descriptor: int, offset: int, values: Tensor) -> None:
    view = values.view(torch.uint8).numpy().data
    done = 0
    while done < len(view):
        # A call reads no more than 2 GiB, and fewer than it was asked for where a signal comes.
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise OSError(f"it ends at byte {offset + done}, before what its header names")
        done += count
