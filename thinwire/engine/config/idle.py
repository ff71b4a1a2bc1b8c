"""Keys that have an effect elsewhere and none beside what else a configuration holds, such as a dynamic loss scale's
beside a fixed one. They are accepted, listed like all that has no effect, and put to their defaults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from thinwire.engine.config.local_updates import is_local_updates
from thinwire.engine.config.models import EngineConfig, OffloadConfig, Section, ZeroConfig
from thinwire.engine.config.without_effect import WithoutEffect
from thinwire.optim import registry

__all__ = ["settle_idle_keys", "take_idle_size"]

_SWITCHED = (
    "fp16",
    "bf16",
    "tensorboard",
    "csv_monitor",
    "wandb",
    "comet",
    "flops_profiler",
    "comms_logger",
    "progressive_layer_drop",
)
_DYNAMIC_SCALE = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
_LOCAL_STEPS = frozenset(name for name in registry.NAMES if registry.entry(name).local_steps)
_SomeSection = TypeVar("_SomeSection", bound=Section)

_SIZE = WithoutEffect("int", "stage 3 is FSDP2, which reduces and gathers one layer at a time")


def take_idle_size(tree: dict[str, Any], without_effect: dict[str, str], problems: list[str]) -> None:
    """Take the bucket size out of `tree` at stage 3, where 0 is as good as any."""
    zero = tree.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") != 3 or "reduce_bucket_size" not in zero:
        return
    path = "zero_optimization.reduce_bucket_size"
    if (problem := _SIZE.problem(path, zero.pop("reduce_bucket_size"))) is not None:
        problems.append(problem)
    else:
        without_effect[path] = _SIZE.why


def settle_idle_keys(config: EngineConfig, without_effect: dict[str, str]) -> EngineConfig:
    """`config` with its idle keys at their defaults, where that matters; paths and reasons join `without_effect`."""
    without_effect |= _switched_off(config)
    without_effect |= _beside_a_fixed_scale(config)
    activations = config.activation_checkpointing
    if activations.cpu_checkpointing and not activations.modules:
        without_effect["activation_checkpointing.cpu_checkpointing"] = (
            'nothing is recomputed; "modules" names what to recompute, by class or by name'
        )
    if config.prescale_gradients and config.gradient_predivide_factor != 1.0:
        without_effect["gradient_predivide_factor"] = (
            '"prescale_gradients" divides by the number of ranks before gradients are summed'
        )
        config = _with(config, gradient_predivide_factor=1.0)
    config = _settled_accumulation(config, without_effect)
    settled = _settled_unused(_settled_overlap(config, without_effect), without_effect)
    settled = _settled_offload(settled, without_effect)
    return config if settled == config.zero_optimization else _with(config, zero_optimization=settled)


def _settled_accumulation(config: EngineConfig, without_effect: dict[str, str]) -> EngineConfig:
    """Gradients add up in the parameters' dtype or in fp32; another 16-bit dtype would hold no more."""
    own = "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else "fp32"
    if config.data_types.grad_accum_dtype in (None, "fp32", own):
        return config
    without_effect["data_types.grad_accum_dtype"] = f"gradients of {own} parameters add up in {own}, or in fp32"
    return _with(config, data_types=_with(config.data_types, grad_accum_dtype=None))


def _switched_off(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Values in sections that never say "enabled"; with "enabled": false it is plain that they are off."""
    for name in _SWITCHED:
        section = getattr(config, name)
        if "enabled" not in section.model_fields_set:
            for key in sorted(section.model_fields_set):
                yield f"{name}.{key}", f'"{name}.enabled" is false unless set to true'


def _beside_a_fixed_scale(config: EngineConfig) -> Iterator[tuple[str, str]]:
    fp16 = config.fp16
    if fp16.enabled and fp16.loss_scale:
        for key in _DYNAMIC_SCALE:
            if key in fp16.model_fields_set:
                yield f"fp16.{key}", f'"fp16.loss_scale" {fp16.loss_scale:g} is a fixed scale; 0 is a dynamic one'


def _settled_overlap(config: EngineConfig, without_effect: dict[str, str]) -> ZeroConfig:
    zero = config.zero_optimization
    name = config.optimizer.type if config.optimizer is not None else None
    if zero.stage == 3 and "overlap_comm" in zero.model_fields_set:
        why = "stage 3 is FSDP2, which always overlaps"
    elif zero.stage == 0 and zero.overlap_comm:
        why = "at stage 0 no weights are gathered; gradients leave during the backward anyway"
    elif zero.overlap_comm and (is_local_updates(name) or name in _LOCAL_STEPS):
        why = f"the steps of {name} gather no weights"
    else:
        return zero
    without_effect["zero_optimization.overlap_comm"] = why
    return _with(zero, overlap_comm=False)


def _settled_unused(zero: ZeroConfig, without_effect: dict[str, str]) -> ZeroConfig:
    if zero.ignore_unused_parameters or zero.stage in (1, 2):
        return zero
    without_effect["zero_optimization.ignore_unused_parameters"] = (
        f"at stage {zero.stage} parameters without a gradient are left alone, as in DeepSpeed"
    )
    return _with(zero, ignore_unused_parameters=True)


def _settled_offload(zero: ZeroConfig, without_effect: dict[str, str]) -> ZeroConfig:
    if zero.stage < 3 and zero.offload_param != OffloadConfig():
        without_effect["zero_optimization.offload_param"] = (
            f"at stage {zero.stage} every rank computes with its own whole parameters"
        )
        zero = _with(zero, offload_param=OffloadConfig())
    for key in ("offload_optimizer", "offload_param"):
        offload = getattr(zero, key)
        if offload.device == "none" and offload.pin_memory:
            without_effect[f"zero_optimization.{key}.pin_memory"] = 'nothing is offloaded while "device" is "none"'
            zero = _with(zero, **{key: OffloadConfig()})
    return zero


def _with(section: _SomeSection, **changes: Any) -> _SomeSection:
    return section.model_copy(update=changes)
