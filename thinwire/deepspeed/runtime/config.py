"""deepspeed.runtime.config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.deepspeed.usage_error import DeepSpeedUsageError
from thinwire.engine import ConfigError as DeepSpeedConfigError
from thinwire.engine import EngineConfig, load_config
from thinwire.engine.config.batch import complete_batch_sizes
from thinwire.engine.config.json_file import read_json_object

__all__ = ["ADAM_OPTIMIZER", "DeepSpeedConfig", "DeepSpeedConfigError"]

ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER = "adam", "adamw", "lamb"
ONEBIT_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER = "onebitadam", "onebitlamb", "zerooneadam"
ADAGRAD_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "adagrad", "lion", "muon"


class DeepSpeedConfig:
    """A configuration, checked and complete: what `thinwire.engine.load_config` returns, by DeepSpeed's call.

    `config`: the path of a file, or a dict, for as many ranks as the job has. Attributes are the keys.

    Raises DeepSpeedConfigError, with every problem in one message.
    """

    def __init__(self, config: str | os.PathLike[str] | Mapping[str, Any], mpu: Any = None) -> None:
        given = config if isinstance(config, Mapping) else read_json_object(Path(config))
        self._param_dict = dict(given)
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.settings = load_config(config, self.world_size)
        self.train_batch_size: int | None = self.settings.train_batch_size
        self.train_micro_batch_size_per_gpu: int | None = self.settings.train_micro_batch_size_per_gpu
        self.gradient_accumulation_steps: int | None = self.settings.gradient_accumulation_steps

    @property
    def monitor_config(self) -> EngineConfig:
        """What MonitorMaster and its parts are made of."""
        return self.settings

    def __getattr__(self, name: str) -> Any:
        if name == "settings":  # not there yet: do not look for it in itself
            raise AttributeError(name)
        return getattr(self.settings, name)

    def _configure_train_batch_size(self) -> None:
        """Complete the three sizes from those that are not None; DeepSpeedUsageError where they do not fit."""
        sizes = (self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps)
        try:
            found = complete_batch_sizes(*sizes, self.world_size)
        except DeepSpeedConfigError as error:
            raise DeepSpeedUsageError(str(error)) from error
        self.train_batch_size = found.train
        self.train_micro_batch_size_per_gpu = found.micro
        self.gradient_accumulation_steps = found.accumulation
