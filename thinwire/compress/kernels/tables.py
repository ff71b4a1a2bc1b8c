"""Tables that tell a kernel on a device where a bucket's runs lie, and their factors: on the device already in most
steps, since neither changes."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["KeptTables", "Table", "Tables", "on_device"]

Table = NDArray[np.void]
"""Structures, one after another."""


class Tables(Protocol):
    """The tables of one bucket's launches."""

    def on_device(self, purpose: tuple[str, int], table: Table, device: torch.device) -> Tensor:
        """The bytes of the table that serves a `purpose`, a kernel and a part of the bucket, for a launch now."""


class KeptTables:
    """Tables that are copied where they are not what lies on the device already."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], tuple[bytes, Tensor]] = {}

    def on_device(self, purpose: tuple[str, int], table: Table, device: torch.device) -> Tensor:
        """See Tables. Raises RuntimeError within a CUDA graph's capture, whose replays would go on with this table."""
        _refuse_capture(device)
        content = table.tobytes()
        kept = self._kept.get(purpose)
        if kept is not None and kept[0] == content and kept[1].device == device:
            return kept[1]
        # New memory, as launches that read the old table may be under way, on other streams too.
        copied = on_device(table, device)
        self._kept[purpose] = (content, copied)
        return copied


def on_device(table: NDArray[Any], device: torch.device) -> Tensor:
    """The bytes of a table, on their way from pinned memory, which torch keeps until the copy is over. Raises
    RuntimeError within a CUDA graph's capture, whose replays would copy what by then lies there."""
    _refuse_capture(device)
    pinned = torch.empty(table.nbytes, dtype=torch.uint8, pin_memory=True)
    pinned.numpy()[:] = table.view("u1")
    return pinned.to(device, non_blocking=True)


def _refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a kernel over a whole bucket cannot be captured in a CUDA graph of your own: its table of runs has the "
            "learning rate of one step in it. Capture forward and backward, and call step() outside of the graph"
        )
