"""Write scalars of a training to TensorBoard, CSV and Weights & Biases: by rank 0 alone, at once, and in
files without a second value for the same sample after a resume."""

from __future__ import annotations

import csv
import io
import os
import re
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from thinwire.comm import Communicator
from thinwire.comm.agreement import on_every_rank
from thinwire.engine.config.models import EngineConfig, MonitorConfig, WandbConfig

Event = tuple[str, float, int]

_VALUE = re.compile(rb"\d+,[^,\n]+\n")


@dataclass
class _Scalar:
    """`last`: the latest sample in the file, -1 without any. `size`: bytes of its whole lines."""

    path: Path
    last: int
    size: int


class ScalarFiles:
    """Writes `folder`/Train_loss.csv for the scalar "Train/loss": a line `sample,Train/loss`, then a line a value.

    A run that goes back, as a resumed one does, goes on from where it went back to: lines at or after the new sample
    move to Train_loss.csv.replaced, so that nothing is lost. Every write is in the file when `write` returns; a line
    that a crash cut short is removed by the next write. Of scalars with one file name the second gets
    Train_loss.2.csv.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scalars: dict[str, _Scalar] = {}

    def write(self, events: Sequence[Event]) -> None:
        """Append values, a `(name, value, sample)` each. Raises OSError where the disk does not take them."""
        for name, value, sample in events:
            scalar = self._scalars.get(name)
            if scalar is None or not scalar.path.exists():
                scalar = self._scalars[name] = self._open(name)
            if sample <= scalar.last:
                _move_aside(scalar, sample)
            line = f"{sample},{value!r}\n".encode()
            with scalar.path.open("r+b", buffering=0) as file:
                file.truncate(scalar.size)
                file.seek(scalar.size)
                if file.write(line) != len(line):
                    raise OSError(f"no space left for {scalar.path}")
            scalar.last, scalar.size = sample, scalar.size + len(line)

    def close(self) -> None:
        """Nothing is open between two writes."""

    def _open(self, name: str) -> _Scalar:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(["sample", name])
        header = text.getvalue().encode()
        stem = re.sub(r"[^A-Za-z0-9.=+-]", "_", name)
        for number in count(1):
            path = self._folder / (f"{stem}.csv" if number == 1 else f"{stem}.{number}.csv")
            if not path.exists() or path.stat().st_size == 0:
                path.write_bytes(header)
            if path.read_bytes().startswith(header):
                break
        values = _values(path)
        size = len(header) + sum(map(len, values))
        return _Scalar(path, max(map(_sample_of, values), default=-1), size)


def _move_aside(scalar: _Scalar, sample: int) -> None:
    """Move the values at `sample` and after it to the file next to this one."""
    with scalar.path.open("rb") as file:
        header = file.readline()
    values = _values(scalar.path)
    kept = [line for line in values if _sample_of(line) < sample]
    with scalar.path.with_name(f"{scalar.path.name}.replaced").open("ab") as replaced:
        replaced.write(b"".join(line for line in values if _sample_of(line) >= sample))
    fresh = scalar.path.with_name(f"{scalar.path.name}.tmp")
    fresh.write_bytes(header + b"".join(kept))
    scalar.size = fresh.stat().st_size
    scalar.last = max(map(_sample_of, kept), default=-1)
    fresh.replace(scalar.path)


def _values(path: Path) -> list[bytes]:
    """The lines after the header, up to the first that is not whole."""
    with path.open("rb") as file:
        file.readline()
        return list(takewhile(_VALUE.fullmatch, file))


def _sample_of(line: bytes) -> int:
    return int(line.partition(b",")[0])


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


class WandbRun:
    """A run that begins at once. Its step is the sample; a value at an earlier one than the last is what wandb drops.

    With `WANDB_MODE=offline` it needs no network and no account.

    Raises ImportError without the package, ValueError where no run can begin.
    """

    def __init__(self, config: WandbConfig) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                f'"wandb" needs the package of that name ({error}): pip install wandb, or use "csv_monitor" instead'
            ) from error
        self._error: type[Exception] = wandb.errors.Error
        try:
            self._run: Any = wandb.init(project=config.project, group=config.group, entity=config.team)
        except wandb.errors.Error as error:
            raise ValueError(
                f"wandb cannot begin a run: {error}. Log in with `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def write(self, events: Sequence[Event]) -> None:
        """Log values, those of one sample together. Raises OSError where wandb takes them no more."""
        by_sample: dict[int, dict[str, float]] = {}
        for name, value, sample in events:
            by_sample.setdefault(sample, {})[name] = value
        try:
            for sample, values in by_sample.items():
                self._run.log(values, step=sample)
        except self._error as error:
            raise OSError(f"wandb takes no more values: {error}") from error

    def close(self) -> None:
        """End the run; what was logged is on disk, or at wandb's server."""
        self._run.finish()


class Monitor:
    """Scalars of a training over the samples it has seen, as TensorBoard events, CSV files, a run of Weights & Biases,
    several of them or none.

    `tensorboard` and `csv` are folders, made where they do not exist. `wandb` is a
    section of a configuration, whatever its `enabled`. Rank 0 writes; the others only check what they are given.
    What a write has taken is on disk when it returns, wandb's once it gets to it. A disk that takes no
    more is a warning, once, and training goes on.

    A run that goes back to an earlier sample, as a resumed one does, replaces what was written at or after it: CSV
    lines are moved to a file next to theirs (`ScalarFiles`), TensorBoard hides the events.

    `enabled`: whether anything is written, on whatever rank. Construction is collective. Raises, on every rank, OSError
    (ValueError on the others) for a folder that cannot be written, ImportError where a package is not installed,
    ValueError if wandb cannot begin.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        tensorboard: str | os.PathLike[str] | None = None,
        csv: str | os.PathLike[str] | None = None,
        wandb: WandbConfig | None = None,
    ) -> None:
        self.enabled = any(one is not None for one in (tensorboard, csv, wandb))
        self._writers: list[TensorBoardFiles | ScalarFiles | WandbRun] = []
        self._warned = False

        def open_writers() -> None:
            if comm.rank:
                return
            if tensorboard is not None:
                self._writers.append(TensorBoardFiles(_writable(Path(tensorboard))))
            if csv is not None:
                self._writers.append(ScalarFiles(_writable(Path(csv))))
            if wandb is not None:
                self._writers.append(WandbRun(wandb))

        if self.enabled:
            on_every_rank(comm, open_writers, "open its logs", (OSError, ImportError, ValueError))

    @classmethod
    def of(cls, comm: Communicator, config: EngineConfig) -> Monitor:
        """One that writes what the sections of `config` have enabled. Collective; raises as the constructor does."""
        places = {name: place_of(getattr(config, section)) for name, section in SECTIONS.items()}
        return cls(comm, **places)

    def write(self, events: Sequence[Event]) -> None:
        """Write (name, value, sample) triples; `sample`: how many samples all ranks have trained on.

        Raises TypeError or ValueError for what is no such triple.
        """
        checked = [_checked(event) for event in events]
        for writer in self._writers:
            try:
                writer.write(checked)
            except OSError as error:
                if not self._warned:
                    warnings.warn(f"scalars are being lost, training goes on: {error}", RuntimeWarning, stacklevel=2)
                self._warned = True

    write_events = write

    def close(self) -> None:
        """Close the files and end the runs; later writes go nowhere."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.close()


SECTIONS = {"tensorboard": "tensorboard", "csv": "csv_monitor", "wandb": "wandb"}
"""Arguments of Monitor -> the sections of a configuration that they follow from."""


def place_of(section: MonitorConfig | WandbConfig) -> Any:
    """The argument of Monitor that a section asks for: the folder of its files, or wandb's section itself; None where
    it is off."""
    if not section.enabled or isinstance(section, WandbConfig):
        return section if section.enabled else None
    return Path(section.output_path) / section.job_name


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
