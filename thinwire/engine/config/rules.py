"""Rules over several keys: what others leave without effect, and what excludes what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from thinwire.comm.operation_log import OPERATION_NAMES
from thinwire.engine.config.errors import MOST_PROBLEMS, did_you_mean, reason, section_of, shown
from thinwire.engine.config.models import EngineConfig, LeafModuleConfig, OffloadConfig, Section, ThinwireConfig
from thinwire.engine.config.options import LOCAL_UPDATES
from thinwire.engine.config.sections import is_local_updates
from thinwire.optim import registry
from thinwire.optim.registry import OptimizerEntry, needs_whole_parameters

_SECTIONS = {name: section_of(field) for name, field in EngineConfig.model_fields.items()}
_SWITCHED = [name for name, section in _SECTIONS.items() if section is not None and "enabled" in section.model_fields]
_DYNAMIC_SCALE = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
_LOCAL_STEPS = frozenset(name for name in registry.NAMES if registry.entry(name).local_steps)
_SomeSection = TypeVar("_SomeSection", bound=Section)


def settle_idle_keys(config: EngineConfig, without_effect: dict[str, str]) -> EngineConfig:
    """`config` with its idle keys at their defaults, where that matters; paths and reasons join `without_effect`."""
    idle = dict(_idle_keys(config))
    without_effect |= dict(_unread(config)) | idle
    for path in idle:
        config = _at_default(config, path)
    return config


def _at_default(section: _SomeSection, path: str) -> _SomeSection:
    key, _, inner = path.partition(".")
    value = (
        _at_default(getattr(section, key), inner)
        if inner
        else type(section).model_fields[key].get_default(call_default_factory=True)
    )
    return section.model_copy(update={key: value})


def _idle_keys(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """(path, why it changes nothing) for each key that others leave without effect."""
    activations, zero = config.activation_checkpointing, config.zero_optimization
    if activations.cpu_checkpointing and not activations.modules:
        why = 'nothing is recomputed; "modules" names what to recompute, by class or by name'
        yield "activation_checkpointing.cpu_checkpointing", why
    if config.prescale_gradients and config.gradient_predivide_factor != 1.0:
        why = '"prescale_gradients" divides by the number of ranks before gradients are summed'
        yield "gradient_predivide_factor", why
    # Gradients add up in the parameters' dtype or in fp32; another 16-bit dtype would hold no more.
    own = "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else "fp32"
    if config.data_types.grad_accum_dtype not in (None, "fp32", own):
        yield "data_types.grad_accum_dtype", f"gradients of {own} parameters add up in {own}, or in fp32"
    name = config.optimizer.type if config.optimizer is not None else None
    if zero.stage == 3 and "reduce_bucket_size" in zero.model_fields_set:
        why = "stage 3 is FSDP2, which reduces and gathers one layer at a time"
        yield "zero_optimization.reduce_bucket_size", why
    if zero.stage == 3 and "overlap_comm" in zero.model_fields_set:
        yield "zero_optimization.overlap_comm", "stage 3 is FSDP2, which always overlaps"
    elif zero.stage == 0 and zero.overlap_comm:
        why = "at stage 0 no weights are gathered; gradients leave during the backward anyway"
        yield "zero_optimization.overlap_comm", why
    elif zero.overlap_comm and config.pipeline.stages > 1:
        yield "zero_optimization.overlap_comm", "a pipeline's stages wait for their weights before a step begins"
    elif zero.overlap_comm and (is_local_updates(name) or name in _LOCAL_STEPS):
        yield "zero_optimization.overlap_comm", f"the steps of {name} gather no weights"
    elif zero.overlap_comm and config.optimizer is not None and config.optimizer.params.get("elastic") is not None:
        yield "zero_optimization.overlap_comm", "elastic workers have all new weights before a step ends"
    if not zero.ignore_unused_parameters and zero.stage not in (1, 2):
        why = f"at stage {zero.stage} parameters without a gradient are left alone"
        yield "zero_optimization.ignore_unused_parameters", why
    if zero.stage < 3 and zero.leaf_module != LeafModuleConfig():
        yield "zero_optimization.leaf_module", f"at stage {zero.stage} parameters are not gathered"
    if zero.stage < 3 and zero.offload_param != OffloadConfig():
        why = f"at stage {zero.stage} every rank computes with its own whole parameters"
        yield "zero_optimization.offload_param", why
    if zero.stage < 3 and zero.node_size > 1:
        yield "zero_optimization.node_size", f"at stage {zero.stage} no weights are gathered in forward and backward"
    for key in ("offload_optimizer", "offload_param") if zero.stage == 3 else ("offload_optimizer",):
        offload = getattr(zero, key)
        if offload.device != "cpu" and offload.pin_memory:
            yield (
                f"zero_optimization.{key}.pin_memory",
                f'no memory is page-locked while "device" is "{offload.device}"',
            )
        if offload.device != "nvme" and offload.nvme_path is not None:
            yield f"zero_optimization.{key}.nvme_path", f'nothing goes to a disk while "device" is "{offload.device}"'


def _unread(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Values in sections that never say "enabled", and those of a dynamic loss scale beside a fixed one."""
    for name in _SWITCHED:
        section = getattr(config, name)
        if "enabled" not in section.model_fields_set:
            for key in sorted(section.model_fields_set):
                yield f"{name}.{key}", f'"{name}.enabled" is false unless set to true'
    fp16 = config.fp16
    if fp16.enabled and fp16.loss_scale:
        for key in _DYNAMIC_SCALE:
            if key in fp16.model_fields_set:
                yield f"fp16.{key}", f'"fp16.loss_scale" {fp16.loss_scale:g} is a fixed scale; 0 is a dynamic one'


def check_combinations(config: EngineConfig) -> list[str]:
    """A sentence for each combination in `config`, with idle keys settled, that cannot work."""
    zero, size = config.zero_optimization, config.zero_optimization.reduce_bucket_size
    return [
        *([f'"zero_optimization.reduce_bucket_size" must be at least 1, got {size}'] if size < 1 else ()),
        *_precision(config),
        *_own_optimizer(config),
        *(_disk(config) if "nvme" in (zero.offload_optimizer.device, zero.offload_param.device) else ()),
        *(_codec(config) if config.communication_codec is not None else ()),
        *(_stage_3_codecs(zero) if zero.stage < 3 and (zero.weights_codec or zero.gradients_codec) else ()),
        *_sparse_attention(config),
        *_layer_drop(config),
        *(_parallelism(config) if config.pipeline.stages > 1 or config.tensor_parallel.autotp_size > 1 else ()),
        *_weights(config),
        *_operations(config),
    ]


def _precision(config: EngineConfig) -> Iterator[str]:
    fp16 = config.fp16
    if fp16.enabled and config.bf16.enabled:
        yield '"fp16.enabled" and "bf16.enabled" are both true: a model trains in one precision; keep one of them'
    if fp16.enabled and not fp16.loss_scale and fp16.min_loss_scale > 2.0**fp16.initial_scale_power:
        yield (
            f'"fp16.min_loss_scale" {fp16.min_loss_scale:g} is above the first scale, 2^{fp16.initial_scale_power}: '
            "lower it, or raise fp16.initial_scale_power"
        )


def _disk(config: EngineConfig) -> Iterator[str]:
    zero, section = config.zero_optimization, '"zero_optimization.offload_'
    for name, offload in (("param", zero.offload_param), ("optimizer", zero.offload_optimizer)):
        if offload.device == "nvme" and offload.nvme_path is None:
            yield f'{section}{name}.nvme_path" is missing: with "device" "nvme" it names a folder of an NVMe disk'
    if zero.stage == 3 and zero.offload_param.device == "nvme":
        if zero.offload_optimizer.device != "nvme":
            yield f'{section}param.device" "nvme" needs the larger optimizer state there: set {section}optimizer" too'
        if zero.node_size > 1 or zero.gradients_codec is not None:
            kept = "copies of weights" if zero.node_size > 1 else "residuals of gradients"
            yield f'{section}param.device" "nvme" does not go with codecs that keep {kept} in memory: delete either'
    if zero.offload_optimizer.device == "nvme" and config.communication_codec is not None:
        yield f'{section}optimizer.device" "nvme" and "communication_codec", which needs master weights: delete one'
    if zero.offload_optimizer.device == "nvme" and config.checkpoint.async_save:
        yield f'{section}optimizer.device" "nvme" and "checkpoint.async_save", which copies all to memory: delete one'


def _own_optimizer(config: EngineConfig) -> Iterator[str]:
    """What goes with some optimizers of ours only, by the registry."""
    name = config.optimizer.type if config.optimizer is not None else None
    if config.optimizer is not None and config.optimizer.params.get("elastic") and not is_local_updates(name):
        yield from _against_elastic(name or "", config)
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
    assert config.optimizer is not None
    name, zero = entry.name, config.zero_optimization
    if zero.stage not in entry.stages:
        *others, last = map(str, entry.stages)
        stages = f"{', '.join(others)} or {last}" if others else last
        beside = ", or AdamW with stage 3" if zero.stage == 3 else ""
        yield (
            f'"zero_optimization.stage" {zero.stage} does not go with {name}: {entry.refused_stages[zero.stage]}. Use '
            f"stage {stages}{beside}"
        )
    if zero.offload_optimizer.device != "none" and not entry.offloads:
        yield (
            f'"zero_optimization.offload_optimizer" does not go with {name}, whose workers use all of their state at '
            "every step: delete it"
        )
    elif zero.offload_optimizer.device == "nvme":
        yield f'"zero_optimization.offload_optimizer.device" "nvme" does not go with {name}: use "cpu", or AdamW'
    elif zero.offload_optimizer.device == "cpu" and zero.stage == 0:
        yield (
            f'"zero_optimization.offload_optimizer" does not go with {name} at stage 0, where every rank keeps all '
            "state beside its weights: use stage 1 or 2, or delete it"
        )
    if config.communication_data_type is not None and "warmup_wire" in config.optimizer.params:
        yield '"communication_data_type" and "optimizer.params.warmup_wire" say the same of the warmup: delete one'
    if "rest_codec" in entry.options.model_fields:
        yield from _beside_codecs(f'"optimizer.params.codec" of {name}', config)
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
    assert config.optimizer is not None
    given, single = config.optimizer.params, not (config.bf16.enabled or config.fp16.enabled)
    inner, nodes = given.get("inner") or {}, given.get("nodes")
    if given.get("touch") is not None and not single:
        yield '"optimizer.params.touch" averages fp32 weights: delete it, "bf16" or "fp16"'
    alone = nodes == "flat" or (isinstance(nodes, list) and len({*nodes}) == len(nodes))
    if alone and zero.stage in (1, 2) and single and not needs_whole_parameters(inner.get("type", "AdamW")):
        yield (
            f'"zero_optimization.stage" {zero.stage} shards state among the ranks of a worker, and '
            f'"optimizer.params.nodes" {shown(nodes)} makes every rank one: use stage 0, or name nodes of several ranks'
        )
    refused = {}
    if zero.offload_optimizer.device != "none":
        refused["zero_optimization.offload_optimizer"] = "which reads a worker's whole state at every outer step"
    if not zero.ignore_unused_parameters:
        refused["zero_optimization.ignore_unused_parameters"] = "as ranks would have to ask each other at every step"
    if config.progressive_layer_drop.enabled:
        refused["progressive_layer_drop"] = "as ranks cannot agree on the layers they drop in a step that sends nothing"
    for path, why in refused.items():
        yield f'"{path}" does not go with {LOCAL_UPDATES}, {why}: delete it'


def _against_elastic(name: str, config: EngineConfig) -> Iterator[str]:
    """What workers that come and go, of the optimizer of this name, have against the rest."""
    exact, has_owners = name not in registry.NAMES, name == "OneBitMuon"
    zero, elastic = config.zero_optimization, '"optimizer.params.elastic"'
    beside = {"bf16": config.bf16.enabled, "communication_codec": config.communication_codec is not None}
    if zero.stage > (exact and not any(beside.values())) and not has_owners:
        also = ', or 1 in fp32 and without "communication_codec"' if exact else ""
        got = " and ".join([str(zero.stage), *(f'"{key}"' for key, there in beside.items() if there and exact)])
        yield f'{elastic} goes with "zero_optimization.stage" 0{also}, got {got}'
    alone, means = "a worker is one process", "gradients are means over the workers that are there"
    refused = (
        ("bf16", config.bf16.enabled and has_owners, f"{name}'s owners and buddies step fp32 parameters"),
        ("fp16", config.fp16.enabled, 'workers have no loss scale in common, which "bf16" does without'),
        (
            "zero_optimization.offload_optimizer",
            (exact or has_owners) and zero.offload_optimizer.device != "none",
            "workers use all of their state at every step",
        ),
        (
            "zero_optimization.ignore_unused_parameters",
            zero.stage > 0 and not zero.ignore_unused_parameters,
            "workers would have to ask each other at every step",
        ),
        ("progressive_layer_drop", config.progressive_layer_drop.enabled, "workers cannot agree on layers"),
        ("pipeline.stages", config.pipeline.stages > 1, alone),
        ("tensor_parallel.autotp_size", config.tensor_parallel.autotp_size > 1, alone),
        ("prescale_gradients", config.prescale_gradients, means),
        ("gradient_predivide_factor", config.gradient_predivide_factor != 1.0, means),
        ("gradient_allreduce_op", config.gradient_allreduce_op == "sum", means),
        ("comms_logger", config.comms_logger.enabled, "it does not see what workers send each other"),
    )
    for path, there, why in refused:
        if there:
            yield f'"{path}" does not go with {elastic}, as {why}: delete one'


def _codec(config: EngineConfig) -> Iterator[str]:
    name = config.optimizer.type if config.optimizer is not None else None
    if name in registry.NAMES or is_local_updates(name):
        yield f'"communication_codec" does not go with {name}, which has "optimizer.params.codec": delete it'
    if config.zero_optimization.stage == 3:
        yield '"communication_codec" does not go with "zero_optimization.stage" 3, which is FSDP2: use stage 0, 1 or 2'
    yield from _beside_codecs('"communication_codec"', config)


def _beside_codecs(codec: str, config: EngineConfig) -> Iterator[str]:
    """What can do nothing where every step's gradients go through the codec of this name."""
    for key in ("communication_data_type", "prescale_gradients", "gradient_predivide_factor"):
        if getattr(config, key) != EngineConfig.model_fields[key].get_default():
            yield f'{codec} says how gradients travel, beside which "{key}" can do nothing: delete it'


def _stage_3_codecs(zero: Any) -> Iterator[str]:
    for key in ("weights_codec", "gradients_codec"):
        if getattr(zero, key) is not None:
            yield f'"zero_optimization.{key}" is for stage 3: use "communication_codec", or a 1-bit optimizer'


def _sparse_attention(config: EngineConfig) -> Iterator[str]:
    if config.sparse_attention is not None:
        from thinwire.sparse_attn.layouts.made import layout_from_config

        try:
            layout_from_config(config.sparse_attention, num_heads=1)
        except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:
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
    if not config.managed_gradient_accumulation:
        yield (
            '"progressive_layer_drop" does not go with "managed_gradient_accumulation" false, as no backward is known '
            "to be a step's last: delete one"
        )
    if config.zero_optimization.stage == 3:
        yield (
            '"progressive_layer_drop" does not go with "zero_optimization.stage" 3, which expects every layer to run: '
            "use stage 0, 1 or 2"
        )


def _weights(config: EngineConfig) -> Iterator[str]:
    if config.initial_weights is not None and config.ranks_of_a_model == 1 and config.zero_optimization.stage < 3:
        yield (
            '"initial_weights" are read by ranks that hold parts of a model, at "zero_optimization.stage" 3 or by '
            '"pipeline" and "tensor_parallel": give the model its values before initialize, as from_pretrained does'
        )


def _parallelism(config: EngineConfig) -> Iterator[str]:
    """What ranks that hold parts of a model have against the rest of the configuration."""
    zero, name = config.zero_optimization, config.optimizer.type if config.optimizer is not None else None
    cut = {
        "sparse_attention": config.sparse_attention is not None,
        "fast_encoder": config.fast_encoder,
        "quantized_training": config.quantized_training is not None,
        "progressive_layer_drop": config.progressive_layer_drop.enabled,
        LOCAL_UPDATES: is_local_updates(name),
        "zero_optimization.stage 3": zero.stage == 3,
    }
    staged = {
        **cut,
        "zero_optimization.stage 2": zero.stage == 2,
        "flops_profiler": config.flops_profiler.enabled,
        '"managed_gradient_accumulation" false': not config.managed_gradient_accumulation,
    }
    own = {"tensor_parallel.autotp_size": (cut, config.tensor_parallel.autotp_size > 1)}
    own["pipeline.stages"] = staged, config.pipeline.stages > 1
    for path, (refused, asked) in own.items():
        for what in (what for what, there in refused.items() if asked and there):
            yield f'"{path}" does not go with {what}' + (
                ": use stage 0 or 1, as gradients of all micro-batches add up on a stage before they leave"
                if "stage 2" in what
                else ""
            )


def _operations(config: EngineConfig) -> Iterator[str]:
    logger = config.comms_logger
    for name in sorted({*logger.prof_ops} - {*OPERATION_NAMES})[:MOST_PROBLEMS]:
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
