"""Files and folders as checkpoints need them, on a disk that others write to as well, and safetensors files among them.

Only regular files of a bounded size are opened, so that a FIFO, a device or an endless file under a checkpoint's name
is an error, and neither a hang nor a process out of memory. What is written is on the disk before its name is there.
Clearing up goes as far as it goes: what cannot be removed is told and left for the next time.

Tensors are written one at a time and hashed on the way: a rank needs memory for one instead of a copy of all, a GPU's
go straight to the file, and a full disk is an OSError. They are read by offset through one descriptor, from the
checksum to the last value: what was verified is what is read, whatever happens to the file's name, and a file that was
cut short is an error and no crash, as with a map of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import stat
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from thinwire.engine.errors import CheckpointError


class NotAFileError(OSError):
    """What has the name of a file is something else: a folder, a FIFO, a device, a socket."""


def open_file(path: str | Path, folder: int | None = None) -> int:
    """A descriptor to read a regular file by, `path` being relative to the descriptor `folder` where that is given.

    Links are followed: what they lead to is checked as everything is. Raises OSError, NotAFileError included.
    """
    # Looked at before, since opening a device can do something, and after, since it may have been exchanged.
    if stat.S_ISREG(os.stat(path, dir_fd=folder).st_mode):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    raise NotAFileError(f"{os.fspath(path)} is not a file")


def read_file(path: str | Path, most_bytes: int, folder: int | None = None) -> bytes:
    """The content of a regular file of at most `most_bytes`. Raises OSError, for a longer one too."""
    with os.fdopen(open_file(path, folder), "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(f"it is longer than the {most_bytes:,} bytes that it can have")
    return content


def create_file(path: Path) -> int:
    """A descriptor to write a new file by; what is there already, a link too, is never written to. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file through a temporary name beside it, so that `path` holds all of `content` or what it held before.

    Raises OSError.
    """
    temporary = path.with_name(f"{path.name}.unfinished")
    temporary.unlink(missing_ok=True)  # of a process that was killed, or a link that leads elsewhere
    with os.fdopen(create_file(temporary), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync_folder(path: Path) -> None:
    """Have the folder's list of names reach the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> str | None:
    """Remove a file, a link, never what it leads to, or a folder with all in it; what is in the way, if anything."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return None
        shutil.rmtree(path, ignore_errors=True)  # all that can be removed
        if os.path.lexists(path):
            shutil.rmtree(path)  # again, for the reason
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path} cannot be removed: {error.strerror or error}"
    return None


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

_OF_CODES = {code: dtype for dtype, code in CODES.items()}
_WRITE_BYTES = 16 << 20
_MOST_HEADER_BYTES = 100_000_000  # as in the format's own reader
_LENGTH_BYTES = 8


def dtype_name(dtype: torch.dtype) -> str:
    """As torch spells it, without the module: "float32"."""
    return str(dtype).removeprefix("torch.")


DTYPES = {dtype_name(dtype): dtype for dtype in CODES}
"""Each of these dtypes by its name."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor's dtype and shape, known now, and its values, asked for by `contiguous()` when their turn comes: on the
    CPU. That raises CheckpointError if they can no longer be read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    contiguous: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Length of its values in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, Tensor | LazyTensor]) -> tuple[int, str]:
    """Write a new safetensors file, and wait until the disk has it. Returns its size in bytes and its sha256.

    Raises OSError, FileExistsError included.
    """
    # Descending element sizes keep every tensor aligned, as the format's own writer does.
    order = sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize)
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key in order:
        one = tensors[key]
        table[key] = {"dtype": CODES[one.dtype], "shape": one.shape, "data_offsets": [offset, offset + one.nbytes]}
        offset += one.nbytes
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _LENGTH_BYTES)
    header = len(header).to_bytes(_LENGTH_BYTES, "little") + header
    digest, size = hashlib.sha256(), 0
    with os.fdopen(create_file(path), "wb") as file:
        for content in chain([memoryview(header)], (_bytes_of(tensors[key]) for key in order)):
            for start in range(0, len(content), _WRITE_BYTES):
                chunk = content[start : start + _WRITE_BYTES]
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _bytes_of(tensor: Tensor | LazyTensor) -> memoryview:
    """A tensor's values, in row-major order, as bytes in CPU memory."""
    here = tensor.contiguous().detach().cpu()
    # Not view(-1): a contiguous tensor of one element may have any stride, which byte views refuse.
    flat = here.as_strided((here.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `offset` of its first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


def stored_tensors(descriptor: int) -> dict[str, StoredTensor]:
    """What the header of a safetensors file says, by the tensors' keys.

    Raises ValueError for what is no safetensors file, OSError where it cannot be read.
    """
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
    return {key: _stored(key, entry, first, end) for key, entry in table.items()}


def checksum(descriptor: int) -> str:
    """The sha256 of a whole file. Raises OSError."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stored(key: str, entry: object, first: int, end: int) -> StoredTensor:
    """What the header says of one tensor, whose bytes lie between `first` and `end`."""
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(low), int(high)]} if code in _OF_CODES:
            dtype = _OF_CODES[code]
            whole = all(type(size) is int and size >= 0 for size in shape) and 0 <= low <= high <= end - first
            if whole and high - low == math.prod(shape) * dtype.itemsize:
                return StoredTensor(dtype, tuple(shape), first + low)
    raise ValueError(f"its header does not say where {key!r} is")


def _read(descriptor: int, offset: int, length: int) -> bytearray:
    content = bytearray(length)
    view = memoryview(content)
    done = 0
    while done < length:
        # A call reads no more than 2 GiB, and fewer than it was asked for where a signal comes.
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise OSError(f"it ends at byte {offset + done}, before what its header names")
        done += count
    return content


# Of a rank. A process has room for 1,024 descriptors where nothing else is set, and needs some for other things.
_MOST_OPEN = 256
_ADVICE = "Load again, and let no other program write into the folder of a checkpoint that is loaded"


class HeldFolder:
    """The folder `path` as it is now, and its safetensors files, until `close` or its own end.

    Names change hands: a save under the same tag puts another folder in the place of one that is being read, and
    clearing up removes it. A descriptor does not: what was verified is what is read.

    Raises OSError where there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._open: OrderedDict[str, int] = OrderedDict()
        self._known: dict[str, tuple[int, ...]] = {}
        self._tensors: dict[str, dict[str, StoredTensor]] = {}
        self._end = weakref.finalize(self, _close, self.descriptor, self._open)

    def close(self) -> None:
        """Let folder and files go: nothing can be read any more."""
        self._end()

    @property
    def has_its_name(self) -> bool:
        """Whether the path still leads here: no save has replaced the checkpoint since, and none has removed it."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except OSError:
            return False

    def file(self, name: str) -> int:
        """A descriptor of the file `name`, open until this is closed or more than a few hundred others are read.

        Raises OSError; CheckpointError where it had to be opened again and is another one than before.
        """
        if not self._end.alive:
            raise CheckpointError(f"{self.path} was closed: read what is needed before")
        if name not in self._open:
            descriptor = open_file(name, self.descriptor)
            found = os.fstat(descriptor)
            identity = (found.st_ino, found.st_size, found.st_mtime_ns)
            if self._known.setdefault(name, identity) != identity:
                os.close(descriptor)
                raise CheckpointError(f"{name} has changed since it was verified. {_ADVICE}")
            if len(self._open) >= _MOST_OPEN:
                os.close(self._open.popitem(last=False)[1])
            self._open[name] = descriptor
        self._open.move_to_end(name)
        return self._open[name]

    def tensors(self, name: str) -> dict[str, StoredTensor]:
        """The `stored_tensors` of the file `name`. Raises ValueError, OSError and what `file` raises."""
        if name not in self._tensors:
            self._tensors[name] = stored_tensors(self.file(name))
        return self._tensors[name]

    def read(self, name: str, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements `start` to `stop` of a tensor of the file `name`, one-dimensional; without `stop` all of it, in its
        own shape. Raises CheckpointError where the file is gone, KeyError."""
        try:
            stored = self.tensors(name)[key]
            shape, width = stored.shape if stop is None else (stop - start,), stored.dtype.itemsize
            content = _read(self.file(name), stored.offset + start * width, math.prod(shape) * width)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{name} of {self.path} can no longer be read: {error}. {_ADVICE}") from error
        if not content:
            return torch.empty(shape, dtype=stored.dtype)
        return torch.frombuffer(content, dtype=stored.dtype).view(shape)


def _close(folder: int, files: OrderedDict[str, int]) -> None:
    for descriptor in (folder, *files.values()):
        os.close(descriptor)
    files.clear()
