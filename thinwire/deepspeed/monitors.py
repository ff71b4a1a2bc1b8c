"""Monitors as DeepSpeed's scripts make them, each of its section of a configuration alone, their defaults, and its
profiler's arguments."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from thinwire import comm as communication
from thinwire.comm import Communicator
from thinwire.engine.config.models import EngineConfig, MonitorConfig, WandbConfig
from thinwire.engine.flops_profiler import FlopsProfiler
from thinwire.engine.monitor import Monitor, log_folder


class DeepSpeedFlopsProfiler(FlopsProfiler):
    """thinwire's, with DeepSpeed's arguments in its order; `ds_engine` is not needed."""

    def __init__(self, model: nn.Module, ds_engine: object = None, recompute_fwd_factor: float = 0.0) -> None:
        super().__init__(model, recompute_fwd_factor)


class _SectionMonitor(Monitor):
    """`config`: the section, or a configuration that has it. Its keys are attributes.

    `comm`: by default that of the job. Collective; raises as `Monitor` does.
    """

    _section: ClassVar[str]

    def __init__(self, config: EngineConfig | MonitorConfig | WandbConfig, comm: Communicator | None = None) -> None:
        section = getattr(config, self._section) if isinstance(config, EngineConfig) else config
        super().__init__(comm or communication.init(), **_place(self._section, section))
        for key in type(section).model_fields:
            setattr(self, key, getattr(section, key))


class TensorBoardMonitor(_SectionMonitor):
    """Event files, of the section "tensorboard"."""

    _section = "tensorboard"


class CsvMonitor(_SectionMonitor):
    """CSV files, of the section "csv_monitor"."""

    _section = "csv_monitor"


class WandbMonitor(_SectionMonitor):
    """A run of Weights & Biases, of the section "wandb"."""

    _section = "wandb"


class MonitorMaster(Monitor):
    """All that a configuration has enabled. Collective; raises as `Monitor` does."""

    def __init__(self, config: EngineConfig, comm: Communicator | None = None) -> None:
        places: dict[str, Any] = {}
        for name in ("tensorboard", "csv_monitor", "wandb"):
            places |= _place(name, getattr(config, name))
        super().__init__(comm or communication.init(), **places)


def _place(name: str, section: Any) -> dict[str, Any]:
    """What Monitor is given for a section; nothing for one that is off."""
    if not section.enabled:
        return {}
    if name == "wandb":
        return {"wandb": section}
    return {name.removesuffix("_monitor"): log_folder(section.output_path, section.job_name)}


_FOLDER, _WANDB = MonitorConfig(), WandbConfig()

TENSORBOARD_ENABLED_DEFAULT = CSV_MONITOR_ENABLED_DEFAULT = _FOLDER.enabled
TENSORBOARD_OUTPUT_PATH_DEFAULT = CSV_MONITOR_OUTPUT_PATH_DEFAULT = _FOLDER.output_path
TENSORBOARD_JOB_NAME_DEFAULT = CSV_MONITOR_JOB_NAME_DEFAULT = _FOLDER.job_name
WANDB_ENABLED_DEFAULT, WANDB_PROJECT_NAME_DEFAULT = _WANDB.enabled, _WANDB.project
WANDB_GROUP_NAME_DEFAULT, WANDB_TEAM_NAME_DEFAULT = _WANDB.group, _WANDB.team
