"""One place that scalars go to, made of its section of a configuration alone, as DeepSpeed's scripts make it."""

from __future__ import annotations

from typing import Any, ClassVar

from thinwire import comm as communication
from thinwire.comm import Communicator
from thinwire.engine.config.models import CometConfig, EngineConfig, MonitorConfig, WandbConfig
from thinwire.engine.monitoring.monitor import Monitor, log_folder

__all__ = ["CometMonitor", "CsvMonitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor"]


class _SectionMonitor(Monitor):
    """`config`: the section, or a configuration that has it. Its keys are attributes.

    `comm`: by default that of the job. Collective; raises as `Monitor` does.
    """

    _section: ClassVar[str]

    def __init__(
        self, config: EngineConfig | MonitorConfig | WandbConfig | CometConfig, comm: Communicator | None = None
    ) -> None:
        section = getattr(config, self._section) if isinstance(config, EngineConfig) else config
        super().__init__(comm or communication.init(), **(self._options(section) if section.enabled else {}))
        for key in type(section).model_fields:
            setattr(self, key, getattr(section, key))

    @staticmethod
    def _options(section: Any) -> dict[str, Any]:
        raise NotImplementedError


class TensorBoardMonitor(_SectionMonitor):
    """Event files, of the section "tensorboard"."""

    _section = "tensorboard"

    @staticmethod
    def _options(section: MonitorConfig) -> dict[str, Any]:
        return {"tensorboard": log_folder(section.output_path, section.job_name)}


class CsvMonitor(_SectionMonitor):
    """CSV files, of the section "csv_monitor"."""

    _section = "csv_monitor"

    @staticmethod
    def _options(section: MonitorConfig) -> dict[str, Any]:
        return {"csv": log_folder(section.output_path, section.job_name)}


class WandbMonitor(_SectionMonitor):
    """A run of Weights & Biases, of the section "wandb"."""

    _section = "wandb"

    @staticmethod
    def _options(section: WandbConfig) -> dict[str, Any]:
        return {"wandb": section}


class CometMonitor(_SectionMonitor):
    """An experiment of Comet, of the section "comet"."""

    _section = "comet"

    @staticmethod
    def _options(section: CometConfig) -> dict[str, Any]:
        return {"comet": section}


class MonitorMaster(Monitor):
    """All that a configuration has enabled. Collective; raises as `Monitor` does."""

    def __init__(self, config: EngineConfig, comm: Communicator | None = None) -> None:
        super().__init__(
            comm or communication.init(),
            **(TensorBoardMonitor._options(config.tensorboard) if config.tensorboard.enabled else {}),
            **(CsvMonitor._options(config.csv_monitor) if config.csv_monitor.enabled else {}),
            **(WandbMonitor._options(config.wandb) if config.wandb.enabled else {}),
            **(CometMonitor._options(config.comet) if config.comet.enabled else {}),
        )
