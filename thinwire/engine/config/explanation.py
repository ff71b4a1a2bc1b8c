"""A configuration in plain sentences: what a job with it will do, for people who did not write it."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from thinwire.engine.config.errors import shown
from thinwire.engine.config.local_updates import is_local_updates
from thinwire.engine.config.models import EngineConfig, OptimizerConfig
from thinwire.engine.config.remarks import OWN_PEAK, UNCLIPPED
from thinwire.engine.schedules import schedule_names
from thinwire.optim import DiLoCo, registry

__all__ = ["explain_config"]

_STAGES = (
    "ZeRO stage 0: every rank holds all weights and all optimizer state.",
    "ZeRO stage 1: master weights and optimizer state are sharded over the ranks.",
    "ZeRO stage 2: master weights, optimizer state and gradients are sharded over the ranks.",
    "ZeRO stage 3: parameters, gradients and optimizer state are sharded over the ranks (torch's FSDP2).",
)
_OF_DILOCO = ("every", "outer_momentum", "fragments", "codec", "nodes")
_LOGS = {
    "tensorboard": "TensorBoard",
    "csv_monitor": "CSV files",
    "wandb": "Weights & Biases",
    "comet": "Comet",
}


def explain_config(config: EngineConfig, world_size: int) -> list[str]:
    """One sentence for each thing that `config` decides, and for each key that has no effect."""
    return [
        *_sizes(config, world_size),
        *_precision(config),
        *_sharding(config),
        *_optimizer(config.optimizer),
        *_schedule(config),
        *_clipping(config),
        *_model(config),
        *_reports(config),
        *_data(config),
        *(f'No effect: "{path}". Whatever it says, {why}.' for path, why in config.remarks.without_effect.items()),
    ]


def _sizes(config: EngineConfig, world_size: int) -> Iterator[str]:
    forwards, micro = config.gradient_accumulation_steps, config.train_micro_batch_size_per_gpu
    ranks = "1 rank" if world_size == 1 else f"each of {world_size} ranks"
    times = "one forward and backward" if forwards == 1 else f"{forwards} forwards and backwards"
    yield f"A step takes {config.train_batch_size} samples: {times} of {micro} on {ranks}."


def _precision(config: EngineConfig) -> Iterator[str]:
    fp16 = config.fp16
    if config.bf16.enabled:
        yield "The model computes in bf16, with fp32 master weights."
    elif not fp16.enabled:
        yield "The model computes in the precision it is given, fp32 as a rule."
    elif fp16.loss_scale:
        yield f"The model computes in fp16, with fp32 master weights and a fixed loss scale of {fp16.loss_scale:g}."
    else:
        hysteresis = "" if fp16.hysteresis is None else f", after {fp16.hysteresis} overflows"
        yield (
            "The model computes in fp16, with fp32 master weights and a loss scale that begins at "
            f"2^{fp16.initial_scale_power}, doubles after {fp16.loss_scale_window} steps without an overflow, and "
            f"halves at overflows{hysteresis}, down to {fp16.min_loss_scale:g}."
        )


def _sharding(config: EngineConfig) -> Iterator[str]:
    zero = config.zero_optimization
    yield _STAGES[zero.stage]
    if zero.stage < 3:
        yield f"Gradients leave in buckets of {zero.reduce_bucket_size} elements, during the backward."
    if zero.overlap_comm:
        yield "step() returns while new weights are on their way; the next forward waits for them layer by layer."
    if not zero.ignore_unused_parameters:
        yield "A step in which a parameter has no gradient is an error."
    offloaded = {"optimizer state": zero.offload_optimizer, "parameters": zero.offload_param}
    for what, offload in offloaded.items():
        if offload.device != "none":
            pinned = "page-locked " if offload.pin_memory else ""
            yield f"Kept in {pinned}{offload.device.upper()} memory between steps: {what}."


def _optimizer(section: OptimizerConfig | None) -> Iterator[str]:
    if section is None:
        yield "The optimizer is the one that the script passes to initialize."
        return
    given = dict(section.params)
    if is_local_updates(section.type):
        inner = given.pop("inner")
        yield (
            f"Every worker steps by itself with {inner['type']}: {_values(inner['params']) or 'its defaults'}; "
            f"gradients never leave it. Workers take an outer step together now and then ({section.type}): "
            f"{_values(_defaults(DiLoCo, _OF_DILOCO) | given)}."
        )
        return
    if section.type in registry.NAMES:
        options = {name: option.default for name, option in registry.entry(section.type).options.items()}
    else:
        options = _defaults(getattr(torch.optim, section.type, None))
    yield f"The optimizer is {section.type}: {_values(options | given)}."
    yield "An optimizer that the script passes to initialize would be used in its place."


def _schedule(config: EngineConfig) -> Iterator[str]:
    section = config.scheduler
    if section is None:
        yield "The learning rate stays as it is, unless the script passes a schedule to initialize."
        return
    options = _defaults(schedule_names().get(section.type))
    yield f"The learning rate follows {section.type}: {_values(options | dict(section.params))}."
    if config.remarks.own_peak:
        yield f"{OWN_PEAK}."


def _clipping(config: EngineConfig) -> Iterator[str]:
    if config.remarks.unclipped:
        yield f"{UNCLIPPED}."
    elif config.gradient_clipping:
        yield f"Gradients are clipped to a global norm of {config.gradient_clipping:g}, after they are averaged."
    else:
        yield "Gradients are not clipped."


def _model(config: EngineConfig) -> Iterator[str]:
    activations, dropping = config.activation_checkpointing, config.progressive_layer_drop
    if activations.modules:
        where = ", whose inputs are kept in CPU memory" if activations.cpu_checkpointing else ""
        yield f"Backward computes {', '.join(activations.modules)} again instead of keeping activations{where}."
    if config.sparse_attention is not None:
        yield f"Attention is block-sparse: {_values(config.sparse_attention)}."
    if dropping.enabled:
        gamma = dropping.gamma if isinstance(dropping.gamma, str) else f"{dropping.gamma:g}"
        yield f"Layers are dropped progressively, down to a keep rate of {dropping.theta:g}, with gamma {gamma}."


def _reports(config: EngineConfig) -> Iterator[str]:
    if config.steps_per_print is not None:
        yield f"Rank 0 prints a line every {config.steps_per_print} steps."
    if config.wall_clock_breakdown:
        yield "Rank 0 prints what the time of a step goes to."
    if config.memory_breakdown:
        yield "Rank 0 prints what memory goes to."
    logs = [name for key, name in _LOGS.items() if getattr(config, key).enabled]
    if logs:
        yield f"Rank 0 logs every step to {', '.join(logs)}."
    if config.flops_profiler.enabled:
        yield f"Rank 0 profiles the step after {config.flops_profiler.profile_step} steps."
    if config.comms_logger.enabled:
        yield "Collectives are counted and timed."


def _data(config: EngineConfig) -> Iterator[str]:
    rest = "left out" if config.dataloader_drop_last else "a smaller batch"
    yield f"Data are shuffled with seed {config.seed}; what does not fill the last batch is {rest}."
    kept = "all" if config.checkpoint.keep_last is None else f"the last {config.checkpoint.keep_last}"
    how = " while training goes on" if config.checkpoint.async_save else ""
    yield f"Checkpoints are written{how}, and {kept} are kept."


def _defaults(kind: Any, names: Collection[str] | None = None) -> dict[str, Any]:
    """The values that a class takes where none is given, of those that a file could hold, or of `names` alone."""
    if kind is None:
        return {}
    parameters = inspect.signature(kind).parameters.values()
    plain = (bool, int, float, str, tuple, list)
    found = {one.name: one.default for one in parameters if isinstance(one.default, plain)}
    return found if names is None else {name: value for name, value in found.items() if name in names}


def _values(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {shown(value)}" for name, value in options.items() if value is not None)
