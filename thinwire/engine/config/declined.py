"""DeepSpeed's keys that would change a result and that thinwire does not have, one by one: which of their values
describe what happens anyway, and what to do where another is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.engine.config.errors import shown

__all__ = ["DECLINED", "Declined"]


@dataclass(frozen=True)
class Declined:
    """A key of DeepSpeed's that cannot be set. `matches`: values that ask for nothing else than what happens anyway.
    An empty section, or one with `"enabled": false`, asks for nothing either. `instead`: what happens, or what
    to do."""

    instead: str
    matches: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        """Whether `value` asks for what happens anyway, so that it can be dropped."""
        if isinstance(value, Mapping):
            return _is_off(value)
        return any(type(value) is type(match) and value == match for match in self.matches)

    def refusal(self, path: str, value: Any) -> str:
        """The sentence that refuses `value`."""
        if self.matches and "auto" not in self.matches:
            expected = " or ".join(shown(match) for match in self.matches)
            return f'"{path}" can only be {expected}, got {shown(value)}: {self.instead}'
        return f'"{path}" is not supported: {self.instead}'


def _is_off(section: Mapping[Any, Any]) -> bool:
    """Whether it is empty or says so; of the parts of "compression_training", their "shared_parameters" do."""
    if "enabled" in section:
        return section["enabled"] in (False, "auto")
    parts = [section["shared_parameters"]] if "shared_parameters" in section else list(section.values())
    return all(isinstance(part, Mapping) and _is_off(part) for part in parts)


def _off(instead: str) -> Declined:
    return Declined(instead, matches=(False,))


DECLINED: Mapping[str, Declined] = {
    # Precision and gradients
    "amp": Declined('it needs apex; use "bf16" or "fp16"'),
    "torch_autocast": Declined('use "bf16" or "fp16", or torch.autocast in your own forward'),
    "fp32_allreduce": _off('give "communication_data_type": "fp32"'),
    "fp16.auto_cast": _off("inputs are yours to cast: give the model tensors in fp16"),
    # ZeRO
    "zero_optimization.zero_quantized_weights": _off("ZeRO++ is not supported; OneBitAdam sends less"),
    "zero_optimization.zero_quantized_nontrainable_weights": _off("ZeRO++ is not supported"),
    "zero_optimization.zero_quantized_gradients": _off("ZeRO++ is not supported; OneBitAdam sends less"),
    "zero_optimization.zeropp_loco_param": Declined("ZeRO++ is not; OneBitAdam sends less", (None,)),
    "zero_optimization.zenflow": Declined("every gradient is stepped with at its own step; delete it", (None,)),
    # Checkpoints
    "nebula": Declined('use "checkpoint": {"async_save": true}'),
    "datastates_ckpt": Declined('use "checkpoint": {"async_save": true}'),
    # Logs and measurements
    "trackio": Declined('use "tensorboard", "csv_monitor", "wandb" or "comet"'),
    "flops_profiler.step": Declined('write "profile_step"', (1,)),
    # What DeepSpeed has and thinwire has not
    "autotuning": Declined("`thinwire plan` predicts step time and memory and recommends a method; delete it"),
    "elasticity": Declined("a checkpoint resumes on any number of ranks; give the batch sizes"),
    "eigenvalue": Declined("it only served quantize_training; delete it"),
    "tensor_parallel": Declined("use torch.distributed.tensor.parallel"),
    "expert_parallel": Declined("every rank holds every expert; delete it"),
    "sequence_parallel_size": Declined("every rank is a data-parallel rank", (1,)),
    "curriculum_learning": Declined("order the data set itself"),
    "data_efficiency": Declined("order the data set itself"),
    "compression_training": Declined("use torchao"),
    "quantize_training": Declined("use torchao"),
    "weight_quantization": Declined("use torchao"),
    "hybrid_engine": Declined("generate with the model itself; delete it"),
}
