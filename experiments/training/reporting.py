"""How a run shows itself: a live bar in a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.training.trainer import Outcome, StepReport, Trainer

__all__ = ["Reporter", "human_bytes", "human_factor", "reporter", "train_to_end"]

_SMOOTHING = 0.98
_LINES_A_RUN = 5


def human_bytes(count: float) -> str:
    """A number of bytes with the unit that suits it, for example "1.23 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def human_factor(factor: float) -> str:
    """A factor in two digits or more, for example "4.4x", "31x"."""
    return f"{factor:.1f}x" if factor < 9.95 else f"{factor:.0f}x"


class Reporter(Protocol):
    """Takes what every step reports."""

    def update(self, report: StepReport) -> None:
        """Shows the step, or keeps it for the next time something is shown."""


@contextmanager
def reporter(
    title: str, *, first_step: int, steps: int, items_a_step: int, unit: str, every: int, rank: int
) -> Iterator[Reporter]:
    """The reporter that suits this rank and where its output goes.

    Args:
        title: what is being trained.
        first_step: steps already done.
        steps: steps in all.
        items_a_step: over all ranks, for the speed.
        unit: what the items are.
        every: steps between two plain lines.
        rank: only rank 0 shows anything.
    """
    if rank:
        yield _Silent()
        return
    pace = _Pace(first_step, steps, items_a_step, unit)
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(title, pace, every)
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[details]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        yield _Bar(progress, title, pace)


def train_to_end(trainer: Trainer, title: str, *, items_a_step: int, unit: str) -> Outcome:
    """Trains as long as the plan says, and shows it; items are over all ranks. Collective."""
    with reporter(
        title,
        first_step=trainer.step,
        steps=trainer.plan.steps,
        items_a_step=items_a_step,
        unit=unit,
        every=max(1, trainer.plan.steps // _LINES_A_RUN),
        rank=trainer.comm.rank,
    ) as progress:
        while not trainer.finished:
            progress.update(trainer.advance())
    return trainer.outcome


class _Silent:
    def update(self, report: StepReport) -> None:
        return


class _Pace:
    """Smoothed loss, speed and the time left."""

    def __init__(self, first_step: int, steps: int, items_a_step: int, unit: str) -> None:
        self.first_step = first_step
        self.steps = steps
        self.items_a_step = items_a_step
        self.unit = unit
        self.loss: float | None = None
        self.validation_loss: float | None = None
        self._started = time.perf_counter()

    def describe(self, report: StepReport) -> str:
        self.loss = report.loss if self.loss is None else _SMOOTHING * self.loss + (1 - _SMOOTHING) * report.loss
        if report.validation_loss is not None:
            self.validation_loss = report.validation_loss
        held_out = "" if self.validation_loss is None else f"held out {self.validation_loss:.3f}  "
        return (
            f"loss {self.loss:.3f}  {held_out}{self._speed(report.step) * self.items_a_step:,.0f} {self.unit}/s  "
            f"{human_bytes(report.bytes_sent)} a step  {report.stage}"
        )

    def left(self, step: int) -> str:
        minutes, seconds = divmod(round((self.steps - step) / self._speed(step)), 60)
        return f"{minutes}:{seconds:02d} left"

    def _speed(self, step: int) -> float:
        """Steps per second since the start."""
        return (step - self.first_step) / (time.perf_counter() - self._started)


class _Bar:
    def __init__(self, progress: Progress, title: str, pace: _Pace) -> None:
        self._progress = progress
        self._pace = pace
        self._task = progress.add_task(title, total=pace.steps, completed=pace.first_step, details="")

    def update(self, report: StepReport) -> None:
        self._progress.update(self._task, completed=report.step, details=self._pace.describe(report))


class _Lines:
    def __init__(self, title: str, pace: _Pace, every: int) -> None:
        self._title = title
        self._pace = pace
        self._every = every

    def update(self, report: StepReport) -> None:
        details = self._pace.describe(report)
        if report.step % self._every == 0 or report.step == self._pace.steps:
            steps = f"{report.step}/{self._pace.steps}"
            print(f"{self._title}  {steps}  {details}  {self._pace.left(report.step)}", file=sys.stderr, flush=True)
