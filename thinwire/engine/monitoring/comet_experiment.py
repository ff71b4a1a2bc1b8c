"""Scalars in an experiment of Comet, through the package `comet_ml`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.engine.config.models import CometConfig
from thinwire.engine.monitoring.scalar_files import Event

__all__ = ["CometExperiment"]


class CometExperiment:
    """An experiment that begins at once, and takes a value of each scalar every `samples_log_interval` samples.

    Raises ImportError without the package, ValueError where no experiment can begin.
    """

    def __init__(self, config: CometConfig) -> None:
        try:
            import comet_ml
        except ImportError as error:
            raise ImportError(
                f'"comet" needs the package comet_ml ({error}): pip install comet_ml, or use "csv_monitor" instead'
            ) from error
        try:
            self._experiment: Any = comet_ml.start(
                api_key=config.api_key,
                project=config.project,
                workspace=config.workspace,
                experiment_key=config.experiment_key,
                mode=config.mode,
                online=config.online,
            )
        except Exception as error:  # what the package raises has no class in common
            raise ValueError(
                f'Comet cannot begin an experiment: {error}. Check "comet" in the configuration, or set its "online" '
                "to false"
            ) from error
        if config.experiment_name is not None:
            self._experiment.set_name(config.experiment_name)
        self._interval = config.samples_log_interval
        self._last: dict[str, int] = {}

    def write(self, events: Sequence[Event]) -> None:
        """Log what is due: a scalar's first value, one after the interval, and one of a run that went back."""
        for name, value, sample in events:
            last = self._last.get(name)
            if last is None or not last < sample < last + self._interval:
                self._experiment.log_metric(name, value, step=sample)
                self._last[name] = sample

    def close(self) -> None:
        """End the experiment; offline, that writes its archive."""
        self._experiment.end()
