"""Reads safetensors files through one descriptor, from the checksum to the last value: what was verified is what is
read, whatever happens to the file's name, and a file that was cut short is an error and no crash, as a map of it is."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.engine.checkpoint.tensor_file import CODES

__all__ = ["StoredTensor", "TensorReader", "checksum"]

_DTYPES = {code: dtype for dtype, code in CODES.items()}
_MOST_HEADER_BYTES = 100_000_000  # as in the format's own reader
_LENGTH_BYTES = 8
_CHUNK_BYTES = 1 << 20


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
    """The tensors of one safetensors file, read by a descriptor that somebody else opens and closes.

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
    while chunk := os.pread(descriptor, _CHUNK_BYTES, offset):
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
