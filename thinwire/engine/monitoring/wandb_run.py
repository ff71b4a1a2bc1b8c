"""Scalars in a run of Weights & Biases, through the package of that name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.engine.config.models import WandbConfig
from thinwire.engine.monitoring.scalar_files import Event

__all__ = ["WandbRun"]


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
