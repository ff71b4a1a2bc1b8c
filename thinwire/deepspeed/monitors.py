"""Monitors as DeepSpeed's scripts make them, each of its section of a configuration alone, their defaults, and its
profiler's arguments; and the timer of an engine that scripts start and stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import nn

from thinwire import comm as communication
from thinwire.comm import Communicator
from thinwire.deepspeed.utilities import logger
from thinwire.engine.config.models import EngineConfig, MonitorConfig, Section, WandbConfig
from thinwire.engine.flops_profiler import FlopsProfiler
from thinwire.engine.monitor import SECTIONS, Monitor, place_of


class DeepSpeedFlopsProfiler(FlopsProfiler):
    """thinwire's, with DeepSpeed's arguments in its order, counting sums as it does; `ds_engine` is not needed."""

    def __init__(self, model: nn.Module, ds_engine: object = None, recompute_fwd_factor: float = 0.0) -> None:
        super().__init__(model, recompute_fwd_factor, counts_sums=True)


module_flop_count: list[int] = []
module_mac_count: list[int] = []
"""Nothing is ever in them: for scripts that look whether a profile has ended."""


class ThroughputTimer:
    """A timer of steps, which scripts start before each micro-batch and stop after it: the engine itself does not.

    The first `start_step` steps are counted and not timed. `batch_size`: samples of a step, over all ranks. With
    `steps_per_output`, every so many steps a line goes to `logging_fn`, by default thinwire's logger. `config` and
    `monitor_memory` are for DeepSpeed's calls. Raises ValueError for a `steps_per_output` that is no positive integer.
    """

    def __init__(
        self,
        config: Any = None,
        batch_size: int | None = None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        if steps_per_output is not None and type(steps_per_output) is not int:
            raise ValueError(f"steps_per_output must be a positive integer or None, got {steps_per_output!r}")
        if steps_per_output is not None and steps_per_output < 1:
            raise ValueError(f"steps_per_output must be greater than 0, got {steps_per_output}")
        self.batch_size, self.start_step = batch_size or 1, start_step
        self.steps_per_output, self.logging = steps_per_output, logging_fn or logger.info
        self.initialized = self.started = False
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.start_time = self.end_time = self.total_elapsed_time = self.step_elapsed_time = 0.0

    def update_epoch_count(self) -> None:
        """Begin another epoch: micro-batches are counted from 0 again."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begin a micro-batch."""
        self.initialized = self.started = True
        if self.global_step_count >= self.start_step:
            self.start_time = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-batch, the last of its step if `global_step`; nothing where none has begun."""
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self.start_time:
            self.end_time = time.perf_counter()
            self.total_elapsed_time += self.end_time - self.start_time
            self.step_elapsed_time = 0.0 if global_step else self.step_elapsed_time + self.end_time - self.start_time
        if global_step and report_speed and self._is_report_boundary():
            self.logging(
                f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"RunningAvgSamplesPerSec={self.avg_samples_per_sec():.6g}"
            )

    def _is_report_boundary(self) -> bool:
        return self.steps_per_output is not None and self.global_step_count % self.steps_per_output == 0

    def avg_samples_per_sec(self) -> float:
        """Samples a second of the steps that were timed, over all ranks; -1 while there is none."""
        timed = self.global_step_count - self.start_step
        return timed * self.batch_size / self.total_elapsed_time if timed > 0 and self.total_elapsed_time else -1.0


class _SectionMonitor(Monitor):
    """A section, given itself or in a configuration, whose keys are attributes. `comm`: by default that of the job."""

    _place: ClassVar[str]

    def __init__(self, config: EngineConfig | MonitorConfig | WandbConfig, comm: Communicator | None = None) -> None:
        section = getattr(config, SECTIONS[self._place]) if isinstance(config, EngineConfig) else config
        places: dict[str, Any] = {self._place: place_of(section)}
        super().__init__(comm or communication.init(), **places)
        for key in type(section).model_fields:
            setattr(self, key, getattr(section, key))


class TensorBoardMonitor(_SectionMonitor):
    """Event files, of the section "tensorboard"."""

    _place = "tensorboard"


class CsvMonitor(_SectionMonitor):
    """CSV files, of the section "csv_monitor"."""

    _place = "csv"


class WandbMonitor(_SectionMonitor):
    """A run of Weights & Biases, of the section "wandb"."""

    _place = "wandb"


class DeepSpeedMonitorConfig(Section):
    """The sections of monitors, of which `get_monitor_config` reads one."""

    tensorboard: MonitorConfig = MonitorConfig()
    csv_monitor: MonitorConfig = MonitorConfig()
    wandb: WandbConfig = WandbConfig()

    @property
    def enabled(self) -> bool:
        """Whether some monitor is."""
        return self.tensorboard.enabled or self.csv_monitor.enabled or self.wandb.enabled


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """The sections of monitors in a configuration."""
    named = {name: param_dict[name] for name in DeepSpeedMonitorConfig.model_fields if name in param_dict}
    return DeepSpeedMonitorConfig.model_validate(named)


class MonitorMaster(Monitor):
    """All that a configuration has enabled. Collective; raises as `Monitor` does."""

    def __init__(self, config: EngineConfig | DeepSpeedMonitorConfig, comm: Communicator | None = None) -> None:
        places: dict[str, Any] = {name: place_of(getattr(config, section)) for name, section in SECTIONS.items()}
        super().__init__(comm or communication.init(), **places)


_FOLDER, _WANDB = MonitorConfig(), WandbConfig()

TENSORBOARD_ENABLED_DEFAULT = CSV_MONITOR_ENABLED_DEFAULT = _FOLDER.enabled
TENSORBOARD_OUTPUT_PATH_DEFAULT = CSV_MONITOR_OUTPUT_PATH_DEFAULT = _FOLDER.output_path
TENSORBOARD_JOB_NAME_DEFAULT = CSV_MONITOR_JOB_NAME_DEFAULT = _FOLDER.job_name
WANDB_ENABLED_DEFAULT, WANDB_PROJECT_NAME_DEFAULT = _WANDB.enabled, _WANDB.project
WANDB_GROUP_NAME_DEFAULT, WANDB_TEAM_NAME_DEFAULT = _WANDB.group, _WANDB.team
