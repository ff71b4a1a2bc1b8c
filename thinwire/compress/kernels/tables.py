"""Tables that tell a kernel on a device where a bucket's runs lie, and their factors: on the device already in most
steps, since neither changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Table = NDArray[np.void]
"""Structures, one after another."""


class KeptTables:
    """Tables of one bucket's launches, copied where they are not what lies on the device already."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], tuple[bytes, Tensor]] = {}

    def on_device(self, purpose: tuple[str, int], table: Table, device: torch.device) -> Tensor:
        """The bytes of the table that serves a `purpose`, a kernel and a part of the bucket, for a launch now.

        Raises RuntimeError within a CUDA graph's capture, whose replays would go on with this table.
        """
        _refuse_capture(device)
        content = table.tobytes()
        kept = self._kept.get(purpose)
        if kept is not None and kept[0] == content and kept[1].device == device:
            return kept[1]
        # New memory, as launches that read the old table may be in flight, on other streams too.
        copied = on_device(table, device)
        self._kept[purpose] = (content, copied)
        return copied


class Arena:
    """Memory on a device of which launches that a graph has captured read what changes from step to step: the host
    writes its copy, and brings all of it there at once before a replay."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        self._on_host = np.zeros(nbytes, dtype=np.uint8)
        self._on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._brought = self._on_host.tobytes()
        self._used = 0

    @staticmethod
    def room(nbytes: int) -> int:
        """Bytes that `take` uses for so many: kernels read tables sixteen bytes at a time."""
        return -(-nbytes // 16) * 16

    def take(self, nbytes: int) -> tuple[NDArray[np.uint8], Tensor]:
        """Memory that is not taken yet: the host's copy, and the device's."""
        place = slice(self._used, self._used + nbytes)
        self._used += self.room(nbytes)
        assert self._used <= len(self._on_host), "the arena is as large as all that is taken of it"
        return self._on_host[place], self._on_device[place]

    def bring(self) -> None:
        """Have the device's memory hold what the host's does, for what is launched from now on: one copy, if any."""
        written = self._on_host.tobytes()
        if written != self._brought:
            self._on_device.copy_(_staged(self._on_host, self.device), non_blocking=True)
            self._brought = written


class CapturedTables:
    """Tables in an arena, for launches that are captured now and replayed with other factors."""

    def __init__(self, arena: Arena) -> None:
        self.device = arena.device
        self._arena = arena
        self._placed: dict[tuple[str, int], tuple[Table, Tensor]] = {}

    def on_device(self, purpose: tuple[str, int], table: Table, device: torch.device) -> Tensor:
        """The bytes of a `purpose`'s table, which are there once the arena has brought them."""
        host, found = self._arena.take(table.nbytes)
        held = host.view(table.dtype)
        held[:] = table
        self._placed[purpose] = (held, found)
        return found

    def change(self, kernel: str, columns: Mapping[str, Any]) -> None:
        """Give the runs of a kernel's tables, whatever their part of the bucket, other members."""
        for (of, _), (held, _) in self._placed.items():
            for name, values in columns.items() if of == kernel else ():
                held[name] = values


def on_device(table: NDArray[Any], device: torch.device) -> Tensor:
    """The bytes of a table, on their way from pinned memory, which torch keeps until the copy is over. Raises
    RuntimeError within a CUDA graph's capture, whose replays would copy what by then lies there."""
    _refuse_capture(device)
    return _staged(table, device).to(device, non_blocking=True)


def _staged(table: NDArray[Any], device: torch.device) -> Tensor:
    staged = torch.empty(table.nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    staged.numpy()[:] = table.view("u1")
    return staged


def _refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a kernel over a whole bucket cannot be captured in a CUDA graph of your own: its table of runs has the "
            "learning rate of one step in it. Capture forward and backward, and call step() outside of the graph"
        )
