"""Options that each are fine and together are not: what excludes what, why, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from thinwire.engine.config.errors import CANNOT_WORK, reason, shown
from thinwire.engine.config.models import EngineConfig, Fp16Config, Section, ThinwireConfig, ZeroConfig
from thinwire.optim import registry
from thinwire.optim.registry import OptimizerEntry
from thinwire.sparse_attn.layouts.config import layout_from_config

__all__ = ["check_combinations", "total_steps"]


_DYNAMIC_ONLY = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")


def check_combinations(config: EngineConfig, allgather_bucket_size: Any) -> list[str]:
    """A sentence for each combination in `config` that cannot work, or in which a value would have no effect.

    `allgather_bucket_size` as it was given, None where it was not: one bucket size serves both ways.
    """
    return [
        *_without_enabled(config),
        *_precision(config),
        *_buckets(config.zero_optimization, allgather_bucket_size),
        *_averaging(config),
        *_overlap(config.zero_optimization),
        *_offload(config.zero_optimization),
        *_own_optimizer(config),
        *_activations(config),
        *_sparse_attention(config),
        *_layer_drop(config),
    ]


def _without_enabled(config: EngineConfig) -> Iterator[str]:
    for name in ("fp16", "bf16", "tensorboard", "csv_monitor", "progressive_layer_drop"):
        section = getattr(config, name)
        if "enabled" in section.model_fields_set:
            continue
        for key in sorted(section.model_fields_set):
            if not _at_default(section, key):
                yield f'"{name}.{key}" has no effect without "{name}.enabled": set that to true, or delete the section'


def _at_default(section: Section, key: str) -> bool:
    default = getattr(type(section)(), key)
    # Every file of DeepSpeed's writes this one, which it ignores at stage 0.
    written = 2 if isinstance(section, Fp16Config) and key == "hysteresis" else default
    return getattr(section, key) in (default, written)


def _averaging(config: EngineConfig) -> Iterator[str]:
    if config.prescale_gradients and config.gradient_predivide_factor != 1.0:
        yield (
            '"gradient_predivide_factor" has no effect with "prescale_gradients", which divides by the number of ranks '
            "before gradients are summed: keep one of them"
        )


def _overlap(zero: ZeroConfig) -> Iterator[str]:
    if zero.overlap_comm and zero.stage == 0:
        yield (
            '"zero_optimization.overlap_comm" has no effect in stage 0, where no weights are gathered: delete '
            "it, or use stage 1 or 2"
        )


def _precision(config: EngineConfig) -> Iterator[str]:
    fp16 = config.fp16
    if fp16.enabled and config.bf16.enabled:
        yield '"fp16.enabled" and "bf16.enabled" are both true: a model trains in one precision; keep one of them'
    if not fp16.enabled:
        return
    if fp16.loss_scale:
        for key in _DYNAMIC_ONLY:
            if not _at_default(fp16, key):
                yield (
                    f'"fp16.{key}" has no effect while "fp16.loss_scale" is {fp16.loss_scale:g}, a fixed scale: delete '
                    "it, or set loss_scale to 0 for a dynamic one"
                )
    elif fp16.min_loss_scale > 2.0**fp16.initial_scale_power:
        yield (
            f'"fp16.min_loss_scale" {fp16.min_loss_scale:g} is above the first scale, 2^{fp16.initial_scale_power}: '
            "lower it, or raise fp16.initial_scale_power"
        )


def _buckets(zero: ZeroConfig, allgather_bucket_size: Any) -> Iterator[str]:
    # Weights are gathered in the buckets in which gradients are reduced: any other size asks for nothing else.
    whole = isinstance(allgather_bucket_size, int | float) and float(allgather_bucket_size).is_integer()
    if allgather_bucket_size is not None and not (whole and allgather_bucket_size >= 1):
        yield (
            '"zero_optimization.allgather_bucket_size" must be a whole number, at least 1, got '
            f"{shown(allgather_bucket_size)}"
        )
    if zero.stage == 3 and zero.reduce_bucket_size != ZeroConfig().reduce_bucket_size:
        yield (
            '"zero_optimization.reduce_bucket_size" has no effect in stage 3, where FSDP2 reduces one layer at a time: '
            'delete it, or write "auto"'
        )


def _offload(zero: ZeroConfig) -> Iterator[str]:
    for key, offload in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if offload.device == "none" and offload.pin_memory:
            yield f'"zero_optimization.{key}.pin_memory" has no effect while "device" is "none": delete it'
    if zero.stage < 3 and zero.offload_param.device == "cpu":
        yield (
            f'"zero_optimization.offload_param" needs stage 3, got stage {zero.stage}, where every rank computes with '
            "its own whole parameters: use stage 3, or offload_optimizer alone"
        )


def _own_optimizer(config: EngineConfig) -> Iterator[str]:
    """What goes with some optimizers of ours only, by the registry."""
    name = config.optimizer.type if config.optimizer is not None else None
    if name in registry.NAMES:
        yield from _against(registry.entry(name), config)
    elif config.thinwire.resync_interval != ThinwireConfig().resync_interval:
        yield (
            f'"thinwire.resync_interval" only matters to {", ".join(registry.NAMES)}, and the optimizer is '
            f"{name or 'not in the configuration'}: delete it"
        )


def _against(entry: OptimizerEntry, config: EngineConfig) -> Iterator[str]:
    """What this optimizer has against the rest of the configuration."""
    name, zero = entry.name, config.zero_optimization
    if zero.stage not in entry.stages:
        *others, last = map(str, entry.stages)
        stages = f"{', '.join(others)} or {last}" if others else last
        beside = ", or AdamW with stage 3" if zero.stage == 3 else ""
        yield (
            f'"zero_optimization.stage" {zero.stage} does not go with {name}: {entry.refused_stages[zero.stage]}. Use '
            f"stage {stages}{beside}"
        )
    if zero.offload_optimizer.device == "cpu" and not entry.offloads:
        yield (
            f'"zero_optimization.offload_optimizer" does not go with {name}, whose workers use all of their state at '
            "every step: delete it"
        )
    elif zero.offload_optimizer.device == "cpu" and zero.stage == 0:
        yield (
            f'"zero_optimization.offload_optimizer" does not go with {name} at stage 0, where every rank keeps all '
            "state beside its weights: use stage 1 or 2, or delete it"
        )
    if zero.overlap_comm and entry.local_steps:
        yield (f'"zero_optimization.overlap_comm" has no effect with {name}, whose steps gather no weights: delete it')
    if config.progressive_layer_drop.enabled and entry.local_steps:
        yield (
            f'"progressive_layer_drop" does not go with {name}: ranks cannot agree on the layers they drop in a step '
            "that sends nothing. Use OneBitAdam"
        )


def _activations(config: EngineConfig) -> Iterator[str]:
    activations = config.activation_checkpointing
    if activations.cpu_checkpointing and not activations.modules:
        yield (
            '"activation_checkpointing.cpu_checkpointing" has no effect without "modules": name the modules to '
            "recompute, by class or by their name in the model"
        )


def _sparse_attention(config: EngineConfig) -> Iterator[str]:
    if config.sparse_attention is not None:
        try:
            layout_from_config(config.sparse_attention, num_heads=1)
        except CANNOT_WORK as error:
            yield reason(error)


def _layer_drop(config: EngineConfig) -> Iterator[str]:
    dropping = config.progressive_layer_drop
    if not dropping.enabled:
        return
    if dropping.gamma == "auto" and total_steps(config) is None:
        yield (
            '"progressive_layer_drop.gamma" "auto" is 100 / "scheduler.params.total_num_steps", which is not there: '
            "give the scheduler one, or gamma as a number"
        )
    if config.zero_optimization.stage == 3:
        yield (
            '"progressive_layer_drop" does not go with "zero_optimization.stage" 3, which expects every layer to run: '
            "use stage 0, 1 or 2"
        )


def total_steps(config: EngineConfig) -> int | None:
    """Of the training, where the scheduler knows; None elsewhere."""
    return config.scheduler.params.get("total_num_steps") if config.scheduler is not None else None
