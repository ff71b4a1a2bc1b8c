"""What DeepSpeed refuses and thinwire could do: its door here raises the same errors, which scripts catch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import TypeAdapter

from thinwire.deepspeed.lazy_names import NotOfferedError
from thinwire.deepspeed.ops.adam import DeepSpeedCPUAdam
from thinwire.deepspeed.ops.lion import DeepSpeedCPULion
from thinwire.deepspeed.runtime.zero.utils import ZeRORuntimeException
from thinwire.deepspeed.usage_error import DeepSpeedUsageError
from thinwire.engine import EngineConfig
from thinwire.engine.config.models import FloatName

__all__ = ["check_buckets", "check_dtypes", "check_optimizer"]

_TESTED = ("torch.", "thinwire.")
_ALIGNMENT = 2  # elements: fp16 values that fill 4 bytes, at which NCCL likes to begin
_FLOAT_NAME: TypeAdapter[str | None] = TypeAdapter(FloatName | None)


def check_optimizer(settings: EngineConfig, tree: Mapping[str, Any], optimizer: Any) -> None:
    """Refuse a client's optimizer that `zero_allow_untested_optimizer` or `zero_force_ds_cpu_optimizer` rules out."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    _check_tested(optimizer, tree)
    offloads = settings.zero_optimization.offload_optimizer.device == "cpu"
    forced = tree.get("zero_force_ds_cpu_optimizer") is True
    if offloads and forced and not isinstance(optimizer, DeepSpeedCPUAdam | DeepSpeedCPULion):
        raise ZeRORuntimeException(
            f'"zero_force_ds_cpu_optimizer" is true, and {type(optimizer).__name__} is not DeepSpeedCPUAdam: delete '
            "the key, as offloaded state is stepped by torch's own optimizer here, or name the optimizer in the "
            "configuration"
        )


def check_buckets(settings: EngineConfig, tree: Mapping[str, Any]) -> None:
    """Refuse an odd `allgather_bucket_size` at stages 1 and 2."""
    zero = tree.get("zero_optimization")
    size = zero.get("allgather_bucket_size") if isinstance(zero, Mapping) else None
    if settings.zero_optimization.stage in (1, 2) and isinstance(size, int) and size % _ALIGNMENT:
        raise DeepSpeedUsageError(
            f'"zero_optimization.allgather_bucket_size" is {size}: allgather_bucket_size must be a multiple of '
            f"nccl_start_alignment_factor, {_ALIGNMENT}. Delete the key: weights are gathered in the buckets of "
            "reduce_bucket_size"
        )


def check_dtypes(settings: EngineConfig, tree: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed has no optimizer for: at stage 0, sums in another dtype than the model computes in."""
    section = tree.get("data_types")
    given = section.get("grad_accum_dtype") if isinstance(section, Mapping) else None
    wanted = _FLOAT_NAME.validate_python(given)
    model = "fp16" if settings.fp16.enabled else "bf16" if settings.bf16.enabled else "fp32"
    if settings.zero_optimization.stage == 0 and wanted not in (None, model):
        raise NotOfferedError(
            f'"data_types.grad_accum_dtype" is {wanted!r}, and the model computes in {model}: DeepSpeed has no '
            "optimizer for both at stage 0, and neither has its door here. Delete the key, use zero_optimization stage "
            "1, or thinwire.initialize, which adds up in fp32 at stage 0 too"
        )


def _check_tested(optimizer: Any, tree: Mapping[str, Any]) -> None:
    """Refuse what "zero_allow_untested_optimizer": false refuses: sharding a client's class that is not torch's."""
    if type(optimizer).__module__.startswith(_TESTED):
        return
    zero = tree.get("zero_optimization")
    sharded = zero.get("stage") if isinstance(zero, Mapping) else zero
    allows = tree.get("zero_allow_untested_optimizer")
    if isinstance(allows, int) and not allows and sharded:
        raise DeepSpeedUsageError(
            f'"zero_allow_untested_optimizer" is false, and {type(optimizer).__name__} is none of torch\'s: delete the '
            "key where the class steps every element by itself, as any elementwise optimizer can be sharded"
        )
