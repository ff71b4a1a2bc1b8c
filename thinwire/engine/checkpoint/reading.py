"""A checkpoint that has been verified, to be read in whatever runs the reader needs, whoever wrote them in whichever
file: so any number of ranks can continue from what another saved."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.checkpoint.held import HeldCheckpoint
from thinwire.engine.checkpoint.manifest import Manifest, RankFile, SliceEntry
from thinwire.engine.checkpoint.snapshot import ModelDescription
from thinwire.engine.checkpoint.tensor_file import dtype_from_name

__all__ = ["LoadedCheckpoint"]


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
        """These values, [numel] on the CPU; KeyError where nobody saved them."""
        if kind == "weight" and numel == 0 and name in self.model.parameters and not self.model.numel(name):
            return torch.empty(0, dtype=self.model.parameters[name][1])  # an empty parameter is in nobody's slice
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
