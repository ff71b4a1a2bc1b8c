"""Where a training writes its scalars, TensorBoard and CSV: by rank 0 alone, at once, and without a second value for
the same sample after a resume."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.comm import Communicator
from thinwire.comm.agreement import on_every_rank
from thinwire.engine.monitoring.scalar_files import Event, ScalarFiles

__all__ = ["Monitor", "log_folder"]


class Monitor:
    """Scalars of a training over the samples it has seen, as TensorBoard events, CSV files, both or neither.

    `tensorboard` and `csv` are folders, made where they do not exist; see `log_folder`. Rank 0 writes; the others only
    check what they are given. What a write has taken is on disk when it returns. A disk that takes no more is a
    warning, once, and training goes on.

    A run that goes back to an earlier sample, as a resumed one does, replaces what was written at or after it: CSV
    lines are moved to a file next to theirs (`ScalarFiles`), TensorBoard hides the events.

    `enabled`: whether anything is written, on whatever rank. Construction is collective. Raises, on every rank, OSError
    (ValueError on the others) for a folder that cannot be written, ImportError for `tensorboard` where that package is
    not installed.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        tensorboard: str | os.PathLike[str] | None = None,
        csv: str | os.PathLike[str] | None = None,
    ) -> None:
        self.enabled = tensorboard is not None or csv is not None
        self._tensorboard: _TensorBoard | None = None
        self._files: ScalarFiles | None = None
        self._warned = False

        def open_writers() -> None:
            if tensorboard is not None:
                self._tensorboard = _TensorBoard(_writable(Path(tensorboard)))
            if csv is not None:
                self._files = ScalarFiles(_writable(Path(csv)))

        if self.enabled:
            action = open_writers if comm.rank == 0 else lambda: None
            on_every_rank(comm, action, "open its logs", (OSError, ImportError))

    def write(self, events: Sequence[Event]) -> None:
        """Write (name, value, sample) triples; `sample`: how many samples all ranks have trained on.

        Raises TypeError or ValueError for what is no such triple.
        """
        checked = [_checked(event) for event in events]
        for writer in (self._tensorboard, self._files):
            if writer is not None:
                try:
                    writer.write(checked)
                except OSError as error:
                    self._warn(error)

    def close(self) -> None:
        """Close the files; later writes go nowhere."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._tensorboard = self._files = None

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            warnings.warn(f"scalars are being lost, training goes on: {error}", RuntimeWarning, stacklevel=3)
        self._warned = True


def log_folder(output_path: str, job_name: str) -> Path:
    """Where a job's scalars go: `output_path`/`job_name`; an empty `output_path` is the working directory."""
    return Path(output_path) / job_name


class _TensorBoard:
    """Event files in one folder, opened by the first write, when it is known from which sample on they hold."""

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
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _writable(folder: Path) -> Path:
    """`folder`, made if need be. Raises OSError where it cannot hold files."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return folder


def _checked(event: Event) -> Event:
    name, value, sample = event
    if not isinstance(name, str) or not name or not name.isprintable():
        raise TypeError(f"a scalar's name must be a printable string, not {name!r}")
    if int(sample) != sample or sample < 0:
        raise ValueError(f"{name}: the sample must be a whole number from 0 on, not {sample!r}")
    return name, float(value), int(sample)
