"""Where a training writes its scalars, TensorBoard, CSV, Weights & Biases and Comet: by rank 0 alone, at once, and in
files without a second value for the same sample after a resume."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from thinwire.comm import Communicator
from thinwire.comm.agreement import on_every_rank
from thinwire.engine.config.models import CometConfig, EngineConfig, MonitorConfig, WandbConfig
from thinwire.engine.monitoring.comet_experiment import CometExperiment
from thinwire.engine.monitoring.scalar_files import Event, ScalarFiles
from thinwire.engine.monitoring.tensorboard_files import TensorBoardFiles
from thinwire.engine.monitoring.wandb_run import WandbRun

__all__ = ["Monitor", "log_folder"]


class Monitor:
    """Scalars of a training over the samples it has seen, as TensorBoard events, CSV files, a run of Weights & Biases,
    an experiment of Comet, several of them or none.

    `tensorboard` and `csv` are folders, made where they do not exist; see `log_folder`. `wandb` and `comet` are
    sections of a configuration, whatever their `enabled`. Rank 0 writes; the others only check what they are given.
    What a write has taken is on disk when it returns, wandb's and Comet's once they get to it. A disk that takes no
    more is a warning, once, and training goes on.

    A run that goes back to an earlier sample, as a resumed one does, replaces what was written at or after it: CSV
    lines are moved to a file next to theirs (`ScalarFiles`), TensorBoard hides the events.

    `enabled`: whether anything is written, on whatever rank. Construction is collective. Raises, on every rank, OSError
    (ValueError on the others) for a folder that cannot be written, ImportError where a package is not installed,
    ValueError where wandb or Comet cannot begin.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        tensorboard: str | os.PathLike[str] | None = None,
        csv: str | os.PathLike[str] | None = None,
        wandb: WandbConfig | None = None,
        comet: CometConfig | None = None,
    ) -> None:
        self.enabled = any(one is not None for one in (tensorboard, csv, wandb, comet))
        self._writers: list[_Writer] = []
        self._warned = False

        def open_writers() -> None:
            if tensorboard is not None:
                self._writers.append(TensorBoardFiles(_writable(Path(tensorboard))))
            if csv is not None:
                self._writers.append(ScalarFiles(_writable(Path(csv))))
            if wandb is not None:
                self._writers.append(WandbRun(wandb))
            if comet is not None:
                self._writers.append(CometExperiment(comet))

        if self.enabled:
            action = open_writers if comm.rank == 0 else lambda: None
            on_every_rank(comm, action, "open its logs", (OSError, ImportError, ValueError))

    @classmethod
    def of(cls, comm: Communicator, config: EngineConfig) -> Monitor:
        """One that writes what the sections of `config` have enabled. Collective; raises as the constructor does."""
        return cls(
            comm,
            tensorboard=_folder_of(config.tensorboard),
            csv=_folder_of(config.csv_monitor),
            wandb=config.wandb if config.wandb.enabled else None,
            comet=config.comet if config.comet.enabled else None,
        )

    def write(self, events: Sequence[Event]) -> None:
        """Write (name, value, sample) triples; `sample`: how many samples all ranks have trained on.

        Raises TypeError or ValueError for what is no such triple.
        """
        checked = [_checked(event) for event in events]
        for writer in self._writers:
            try:
                writer.write(checked)
            except OSError as error:
                self._warn(error)

    write_events = write

    def close(self) -> None:
        """Close the files and end the runs; later writes go nowhere."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.close()

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            warnings.warn(f"scalars are being lost, training goes on: {error}", RuntimeWarning, stacklevel=3)
        self._warned = True


def log_folder(output_path: str, job_name: str) -> Path:
    """Where a job's scalars go: `output_path`/`job_name`; an empty `output_path` is the working directory."""
    return Path(output_path) / job_name


class _Writer(Protocol):
    """One place that scalars go to."""

    def write(self, events: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


def _folder_of(section: MonitorConfig) -> Path | None:
    return log_folder(section.output_path, section.job_name) if section.enabled else None


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
