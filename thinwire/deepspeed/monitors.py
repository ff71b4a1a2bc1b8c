"""Monitors as DeepSpeed's scripts make them, each of its section of a configuration alone, their defaults, and its
profiler's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from thinwire import comm as communication
from thinwire.comm import Communicator
from thinwire.engine.config.models import EngineConfig, MonitorConfig, Section, WandbConfig
from thinwire.engine.flops_profiler import FlopsProfiler
from thinwire.engine.monitor import SECTIONS, Monitor, place_of


class DeepSpeedFlopsProfiler(FlopsProfiler):
    """thinwire's, with DeepSpeed's arguments in its order; `ds_engine` is not needed."""

    def __init__(self, model: nn.Module, ds_engine: object = None, recompute_fwd_factor: float = 0.0) -> None:
        super().__init__(model, recompute_fwd_factor)


class _SectionMonitor(Monitor):
    """`config`: the section, or a configuration that has it. Its keys are attributes.

    `comm`: by default that of the job. Collective; raises as `Monitor` does.
    """

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
