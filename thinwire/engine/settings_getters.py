"""What an engine says of its configuration, by DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from thinwire.engine.config import EngineConfig
from thinwire.engine.config.models import OffloadConfig

__all__ = ["SettingsGetters"]


class SettingsGetters:
    """Reads `settings`, the configuration as it is now; changes nothing."""

    settings: EngineConfig

    # Batches

    @property
    def config(self) -> dict[str, Any]:
        """The configuration with its defaults, by DeepSpeed's keys; a copy."""
        return self.settings.describe()

    def train_batch_size(self) -> int:
        """Samples of a step, over all ranks."""
        return self.settings.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one forward on one rank."""
        return self.settings.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self.settings.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps), as numbers."""
        settings = self.settings
        return (
            settings.train_batch_size,
            settings.train_micro_batch_size_per_gpu,
            settings.gradient_accumulation_steps,
        )

    def dataloader_drop_last(self) -> bool:
        """Whether loaders leave out what does not fill a batch."""
        return self.settings.dataloader_drop_last

    # Optimizer and schedule, as the configuration names them

    def optimizer_name(self) -> str | None:
        """The optimizer's type in the configuration; None where it has none."""
        section = self.settings.optimizer
        return None if section is None else section.type

    def optimizer_params(self) -> Mapping[str, Any] | None:
        """The optimizer's arguments in the configuration, defaults included; None where it has none."""
        section = self.settings.optimizer
        return None if section is None else dict(section.params)

    def scheduler_name(self) -> str | None:
        """The schedule's type in the configuration; None where it has none."""
        section = self.settings.scheduler
        return None if section is None else section.type

    def scheduler_params(self) -> Mapping[str, Any] | None:
        """The schedule's arguments in the configuration; None where it has none."""
        section = self.settings.scheduler
        return None if section is None else dict(section.params)

    def gradient_clipping(self) -> float:
        """What the averaged gradient's norm is clipped to; 0 where it is not."""
        return self.settings.gradient_clipping

    # Precision

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return self.settings.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""
        return self.settings.bf16.enabled

    def amp_enabled(self) -> bool:
        """Whether apex casts: never."""
        return False

    def loss_scale(self) -> float:
        """fp16's loss scale in the configuration; 0 where it is dynamic: `optimizer.cur_scale` is what it is now."""
        return self.settings.fp16.loss_scale

    def dynamic_loss_scale(self) -> bool:
        """Whether fp16's loss scale follows from overflows."""
        return self.settings.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        """The loss scale that fp16 begins with."""
        return 2.0**self.settings.fp16.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, float]:
        """How fp16's loss scale follows from overflows."""
        fp16 = self.settings.fp16
        of_stage = 2 if self.zero_optimization() else 1
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": fp16.loss_scale_window,
            "min_scale": fp16.min_loss_scale,
            "delayed_shift": of_stage if fp16.hysteresis is None else fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
        }

    @property
    def communication_data_type(self) -> torch.dtype:
        """In which gradients leave, where they are not compressed; at stage 3 they are summed in fp32."""
        if self.settings.zero_optimization.stage == 3:
            return torch.float32
        if self.settings.fp16.enabled:
            return torch.float16
        return torch.bfloat16 if self.settings.bf16.enabled else torch.float32

    @property
    def gradient_average(self) -> bool:
        """Whether gradients are averaged over the ranks: always."""
        return True

    def sparse_gradients_enabled(self) -> bool:
        """Whether embeddings' gradients leave as their rows: never."""
        return False

    # ZeRO

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.settings.zero_optimization.stage > 0

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self.settings.zero_optimization.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded: from stage 2 on."""
        return self.settings.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded: at stage 3."""
        return self.settings.zero_optimization.stage == 3

    def zero_overlap_comm(self) -> bool:
        """Whether step() returns while new weights are on their way."""
        return self.settings.zero_optimization.overlap_comm

    def zero_reduce_bucket_size(self) -> int:
        """Elements of gradients that leave together."""
        return self.settings.zero_optimization.reduce_bucket_size

    def zero_offload_optimizer(self) -> OffloadConfig | None:
        """Where the optimizer's state rests between steps; None where it stays on the device."""
        section = self.settings.zero_optimization.offload_optimizer
        return None if section.device == "none" else section

    def zero_offload_param(self) -> OffloadConfig | None:
        """Where stage 3's shards rest between steps; None where they stay on the device."""
        section = self.settings.zero_optimization.offload_param
        return None if section.device == "none" else section

    def zero_cpu_offload(self) -> bool:
        """Whether the optimizer's state rests in CPU memory."""
        return self.settings.zero_optimization.offload_optimizer.device == "cpu"

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether `save_16bit_model` writes whole weights at stage 3: always."""
        return True

    # Layer drop

    def pld_enabled(self) -> bool:
        """Whether layers are dropped while the model trains."""
        return self.settings.progressive_layer_drop.enabled

    def pld_params(self) -> dict[str, Any] | bool:
        """Layer drop's `theta` and `gamma`; False where it is off."""
        section = self.settings.progressive_layer_drop
        return {"theta": section.theta, "gamma": section.gamma} if section.enabled else False

    def pld_theta(self) -> float:
        """What layer drop's θ falls to."""
        return self.settings.progressive_layer_drop.theta

    def pld_gamma(self) -> float | str:
        """How fast layer drop's θ falls."""
        return self.settings.progressive_layer_drop.gamma

    # Reports

    def steps_per_print(self) -> int | None:
        """Steps between two lines of rank 0; None where it prints none."""
        return self.settings.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether a step's times are printed."""
        return self.settings.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        """Whether memory is printed."""
        return self.settings.memory_breakdown
