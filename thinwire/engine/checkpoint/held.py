"""Holds a checkpoint's folder open while it is verified and read. Names change hands: a save under the same tag puts
another folder in the place of this one, and a prune removes it. A descriptor does not: what is opened through this one
is of one save, and files that are open stay readable once they are removed."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from thinwire.engine.checkpoint.errors import CheckpointError
from thinwire.engine.checkpoint.manifest import manifest_bytes
from thinwire.engine.checkpoint.regular_files import open_file
from thinwire.engine.checkpoint.tensor_reader import TensorReader

__all__ = ["HeldCheckpoint"]

Result = TypeVar("Result")

# Of a rank. A process has room for 1,024 descriptors where nothing else is set, and needs some for other things.
_MOST_OPEN = 256


class HeldCheckpoint:
    """The folder `path` as it is now, until `close` or its own end. Raises OSError where there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._open: OrderedDict[str, int] = OrderedDict()
        self._known: dict[str, tuple[int, ...]] = {}
        self._readers: dict[str, TensorReader] = {}
        self._end = weakref.finalize(self, _close, self._folder, self._open)

    def close(self) -> None:
        """Let folder and files go: nothing can be read any more."""
        self._end()

    @property
    def has_its_name(self) -> bool:
        """Whether the path still leads here: no save has replaced the checkpoint since, and none has removed it."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._folder))
        except OSError:
            return False

    def manifest(self) -> bytes:
        """The content of the manifest. Raises CheckpointError where there is none to be read."""
        return manifest_bytes(self.path, self._folder)

    def file(self, name: str) -> int:
        """A descriptor of the file `name`, open until this is closed or more than a few hundred others are read.

        Raises OSError; CheckpointError where it had to be opened again and is another one than before.
        """
        if not self._end.alive:
            raise CheckpointError(f"{self.path} was closed: read what is needed before")
        if name not in self._open:
            descriptor = open_file(name, self._folder)
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

    def reader(self, name: str) -> TensorReader:
        """What the header of the file `name` says. Raises ValueError, OSError and what `file` raises."""
        if name not in self._readers:
            self._readers[name] = TensorReader(self.file(name))
        return self._readers[name]

    def run(self, name: str, key: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of a tensor in the file `name`. Raises CheckpointError where they are gone."""
        return self._checked(name, lambda: self.reader(name).run(self.file(name), key, start, stop))

    def whole(self, name: str, key: str) -> Tensor:
        """A tensor in the file `name`, in its own shape. Raises CheckpointError where it is gone."""
        return self._checked(name, lambda: self.reader(name).whole(self.file(name), key))

    def _checked(self, name: str, read: Callable[[], Result]) -> Result:
        try:
            return read()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{name} of {self.path} can no longer be read: {error}. {_ADVICE}") from error


_ADVICE = "Load again, and let no other program write into the folder of a checkpoint that is loaded"


def _close(folder: int, files: OrderedDict[str, int]) -> None:
    for descriptor in (folder, *files.values()):
        os.close(descriptor)
    files.clear()
