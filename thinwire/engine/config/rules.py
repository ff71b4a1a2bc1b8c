"""Options that each are fine and together are not: what excludes what, why, and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.comm.operation_log import OPERATION_NAMES
from thinwire.engine.config.errors import CANNOT_WORK, did_you_mean, reason, shown
from thinwire.engine.config.local_updates import LOCAL_UPDATES, is_local_updates
from thinwire.engine.config.models import EngineConfig, ThinwireConfig
from thinwire.optim import registry
from thinwire.optim.exact import needs_whole_parameters
from thinwire.optim.registry import OptimizerEntry

__all__ = ["check_combinations", "total_steps"]


def check_combinations(config: EngineConfig) -> list[str]:
    """A sentence for each combination in `config` that cannot work."""
    return [
        *_precision(config),
        *_own_optimizer(config),
        *_sparse_attention(config),
        *_layer_drop(config),
        *_operations(config),
    ]


def _precision(config: EngineConfig) -> Iterator[str]:
    fp16 = config.fp16
    if fp16.enabled and config.bf16.enabled:
        yield '"fp16.enabled" and "bf16.enabled" are both true: a model trains in one precision; keep one of them'
    if not fp16.enabled:
        return
    if not fp16.loss_scale and fp16.min_loss_scale > 2.0**fp16.initial_scale_power:
        yield (
            f'"fp16.min_loss_scale" {fp16.min_loss_scale:g} is above the first scale, 2^{fp16.initial_scale_power}: '
            "lower it, or raise fp16.initial_scale_power"
        )


def _own_optimizer(config: EngineConfig) -> Iterator[str]:
    """What goes with some optimizers of ours only, by the registry."""
    name = config.optimizer.type if config.optimizer is not None else None
    if name in registry.NAMES:
        yield from _against(registry.entry(name), config)
        return
    if is_local_updates(name):
        yield from _against_local_updates(config)
    if name is not None and needs_whole_parameters(name) and config.zero_optimization.stage == 3:
        yield (
            f'"zero_optimization.stage" 3 does not go with {name}, which steps whole parameters, and FSDP2 keeps them '
            "in pieces: use stage 0, 1 or 2, or AdamW with stage 3"
        )
    if config.thinwire.resync_interval != ThinwireConfig().resync_interval:
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
    if config.progressive_layer_drop.enabled and entry.local_steps:
        yield (
            f'"progressive_layer_drop" does not go with {name}: ranks cannot agree on the layers they drop in a step '
            "that sends nothing. Use OneBitAdam"
        )


def _against_local_updates(config: EngineConfig) -> Iterator[str]:
    """What workers that step by themselves have against the rest of the configuration."""
    zero = config.zero_optimization
    if zero.stage == 3:
        yield (
            f'"zero_optimization.stage" 3 does not go with {LOCAL_UPDATES}, whose workers need a whole replica each: '
            "use stage 0, or 1 or 2 to shard a worker's state among its ranks, or AdamW with stage 3"
        )
    refused = {
        "zero_optimization.offload_optimizer": zero.offload_optimizer.device == "cpu",
        "zero_optimization.ignore_unused_parameters": not zero.ignore_unused_parameters,
        "progressive_layer_drop": config.progressive_layer_drop.enabled,
    }
    for path, asked in refused.items():
        if asked:
            yield f'"{path}" does not go with {LOCAL_UPDATES}, {_NOT_WITH_LOCAL_UPDATES[path]}: delete it'


_NOT_WITH_LOCAL_UPDATES = {
    "zero_optimization.offload_optimizer": "which reads a worker's whole state at every outer step",
    "zero_optimization.ignore_unused_parameters": "as ranks would have to ask each other at every step",
    "progressive_layer_drop": "as ranks cannot agree on the layers they drop in a step that sends nothing",
}


def _sparse_attention(config: EngineConfig) -> Iterator[str]:
    if config.sparse_attention is not None:
        from thinwire.sparse_attn.layouts.made import layout_from_config

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


def _operations(config: EngineConfig) -> Iterator[str]:
    logger = config.comms_logger
    for name in logger.prof_ops:
        if name not in OPERATION_NAMES:
            yield (
                f'"comms_logger.prof_ops" names {shown(name)}, which is no collective.'
                + did_you_mean(name, tuple(OPERATION_NAMES))
            )
    if logger.enabled and not logger.prof_all and not logger.prof_ops:
        yield (
            '"comms_logger.prof_all" is false and "prof_ops" names no collective, so that nothing would be counted: '
            "name some, or delete both"
        )


def total_steps(config: EngineConfig) -> int | None:
    """Of the training, where the scheduler knows; None elsewhere."""
    return config.scheduler.params.get("total_num_steps") if config.scheduler is not None else None
