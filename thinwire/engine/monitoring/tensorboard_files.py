"""Scalars as TensorBoard's event files, at once, and without a second value for a sample after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.engine.monitoring.scalar_files import Event

__all__ = ["TensorBoardFiles"]


class TensorBoardFiles:
    """Event files in `folder`, opened by the first write, when it is known from which sample on they hold.

    Raises ImportError without the package tensorboard.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f'TensorBoard logs need the package "tensorboard" ({error}): pip install tensorboard, or use '
                '"csv_monitor" instead'
            ) from error
        self._folder = folder
        self._summary_writer: Any = SummaryWriter
        self._writer: Any = None
        self._last: dict[str, int] = {}

    def write(self, events: Sequence[Event]) -> None:
        """Add values, which hide earlier ones at or after their samples. Raises OSError where the disk is full."""
        if not events:
            return
        back = [sample for name, _, sample in events if sample <= self._last.get(name, -1)]
        if self._writer is None or back:
            self.close()
            first = min(back or [sample for _, _, sample in events])
            self._writer = self._summary_writer(str(self._folder), purge_step=first)
        for name, value, sample in events:
            self._writer.add_scalar(name, value, sample)
            self._last[name] = sample
        self._writer.flush()

    def close(self) -> None:
        """Close the file; a later write opens another."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
