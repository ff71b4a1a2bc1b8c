"""An open checkpoint: held by descriptors while it is verified and read, in whatever runs the reader needs.

Names change hands: a save under the same tag puts another folder in the place of one that is being read, and clearing
up removes it. A descriptor does not: what was verified is what is read.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.engine.checkpoint.files import CheckpointError, open_file
from thinwire.engine.checkpoint.manifest import Manifest, ModelDescription, RankFile, SliceEntry, manifest_bytes
from thinwire.engine.checkpoint.tensor_file import TensorReader, dtype_from_name

__all__ = ["HeldCheckpoint", "LoadedCheckpoint"]

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


class LoadedCheckpoint:
    """A SliceSource over the files of one checkpoint.

    It reads from `held` alone, what was verified, and closes it: `close`, or leaving a `with`, ends all reading.
    `path` is where the checkpoint was found, `shared` holds the JSON values of the whole job.

    Reading raises CheckpointError where a file can no longer be read.
    """

    def __init__(self, held: HeldCheckpoint, tag: str, manifest: Manifest) -> None:
        self.path = held.path
        self.tag = tag
        self.manifest = manifest
        self.shared = manifest.shared
        self._held = held
        self._entries: dict[tuple[str, str], list[SliceEntry]] = defaultdict(list)
        for entry in sorted(manifest.slices, key=lambda entry: (entry.start, entry.numel)):
            self._entries[entry.kind, entry.name].append(entry)

    @property
    def world_size(self) -> int:
        """Ranks of the job that saved."""
        return self.manifest.world_size

    @property
    def model(self) -> ModelDescription:
        """Of the model that was saved."""
        return self.manifest.model

    def counters(self) -> dict[str, Any]:
        """What the optimizer's `counters` returned."""
        counters: dict[str, Any] = self.shared["optimizer"]
        return counters

    def rank_values(self, rank: int) -> dict[str, Any]:
        """The JSON values of that rank of the saving job; KeyError where there was none."""
        return self._rank(rank).values

    def kinds(self) -> set[str]:
        """The roles that any parameter has values for."""
        return {kind for kind, _ in self._entries}

    def dtype_of(self, kind: str, name: str) -> torch.dtype | None:
        """What this parameter's values of this kind were saved in, or None where there are none."""
        entries = self._entries.get((kind, name))
        return dtype_from_name(entries[0].dtype) if entries else None

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """These values, [numel] on the CPU; KeyError if no rank saved them."""
        if kind == "weight" and numel == 0 and name in self.model.parameters and not self.model.numel(name):
            return torch.empty(0, dtype=self.model.parameters[name][1])  # an empty parameter is in no slice
        entries = self._entries.get((kind, name))
        stop = start + numel
        if not entries or start < 0 or numel < 0 or stop > entries[-1].start + entries[-1].numel:
            raise KeyError(f"elements {start} to {stop} of {kind} of {name!r} are not in checkpoint {self.tag!r}")
        values = torch.empty(numel, dtype=dtype_from_name(entries[0].dtype))
        first = bisect_right(entries, start, key=lambda entry: entry.start) - 1
        for entry in entries[first:]:
            low, high = max(start, entry.start), min(stop, entry.start + entry.numel)
            if entry.start >= stop:
                break
            if low < high:
                run = self._held.run(entry.file, entry.key, low - entry.start, high - entry.start)
                values[low - start : high - start] = run
        return values

    def read_rank(self, key: str, rank: int) -> Tensor:
        """`rank_tensors[key]` of that rank of the saving job; KeyError where there is none."""
        file = self._rank(rank)
        if key not in file.rank_tensors:
            raise KeyError(f"rank {rank} saved no {key!r} in checkpoint {self.tag!r}")
        return self._held.whole(file.name, file.rank_tensors[key])

    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers, on the CPU."""
        return {
            name: self._held.whole(file.name, key) for file in self.manifest.files for name, key in file.buffers.items()
        }

    def close(self) -> None:
        """Close the files: nothing can be read any more."""
        self._held.close()

    def __enter__(self) -> LoadedCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rank(self, rank: int) -> RankFile:
        if not 0 <= rank < self.world_size:
            raise KeyError(f"there is no rank {rank} in checkpoint {self.tag!r}, saved by {self.world_size} ranks")
        return self.manifest.files[rank]
