"""DeepSpeed's monitors, and the defaults of their sections."""

from __future__ import annotations

from thinwire.engine.config.models import MonitorConfig, WandbConfig
from thinwire.engine.monitoring.section_monitors import (
    CometMonitor,
    CsvMonitor,
    MonitorMaster,
    TensorBoardMonitor,
    WandbMonitor,
)

__all__ = [
    "CSV_MONITOR_ENABLED_DEFAULT",
    "CSV_MONITOR_JOB_NAME_DEFAULT",
    "CSV_MONITOR_OUTPUT_PATH_DEFAULT",
    "TENSORBOARD_ENABLED_DEFAULT",
    "TENSORBOARD_JOB_NAME_DEFAULT",
    "TENSORBOARD_OUTPUT_PATH_DEFAULT",
    "WANDB_ENABLED_DEFAULT",
    "WANDB_GROUP_NAME_DEFAULT",
    "WANDB_PROJECT_NAME_DEFAULT",
    "WANDB_TEAM_NAME_DEFAULT",
    "CometMonitor",
    "CsvMonitor",
    "MonitorMaster",
    "TensorBoardMonitor",
    "WandbMonitor",
]

_FOLDER, _WANDB = MonitorConfig(), WandbConfig()

TENSORBOARD_ENABLED_DEFAULT = CSV_MONITOR_ENABLED_DEFAULT = _FOLDER.enabled
TENSORBOARD_OUTPUT_PATH_DEFAULT = CSV_MONITOR_OUTPUT_PATH_DEFAULT = _FOLDER.output_path
TENSORBOARD_JOB_NAME_DEFAULT = CSV_MONITOR_JOB_NAME_DEFAULT = _FOLDER.job_name
WANDB_ENABLED_DEFAULT, WANDB_PROJECT_NAME_DEFAULT = _WANDB.enabled, _WANDB.project
WANDB_GROUP_NAME_DEFAULT, WANDB_TEAM_NAME_DEFAULT = _WANDB.group, _WANDB.team
