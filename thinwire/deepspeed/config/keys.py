"""DeepSpeed's keys that the engine's models do not have, each in exactly one of two tables.

A key in `WITHOUT_EFFECT` cannot make a result worse or other here: how much moves at a time, how long something is
kept, what is printed. Any value of its type is accepted, and the job says once that a configuration holds it. A key
in `DECLINED` would change a result: it is refused unless its value describes what happens anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from thinwire.engine.config.errors import expected, shown
from thinwire.engine.config.loading import Notes
from thinwire.optim.settings import WholeNumber

Object = Mapping[str, Any]


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


@dataclass(frozen=True)
class WithoutEffect:
    """A key that changes nothing. `kind`: the type of its values; "auto" is taken too. `why`: what happens whatever the
    value is."""

    kind: Any
    why: str

    def note(self, path: str, value: Any, notes: Notes) -> None:
        """Note that what stands at `path` changes nothing, or that `value` is of a wrong type."""
        try:
            if not (isinstance(value, str) and value == "auto"):
                _adapter(self.kind).validate_python(value)
            notes.without_effect[path] = self.why
        except ValidationError:
            wanted = expected(FieldInfo.from_annotation(self.kind))
            notes.problems.append(f'"{path}" must be {wanted}, got {shown(value)}')


@dataclass(frozen=True)
class Declined:
    """A key that cannot be set. `matches`: values that ask for nothing else than what happens anyway.
    An empty section, or one with `"enabled": false`, asks for nothing either, but for those that null alone turns off.
    `instead`: what happens, or what to do."""

    instead: str
    matches: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        """Whether `value` asks for what happens anyway, so that it can be dropped."""
        if isinstance(value, Mapping) and None not in self.matches:
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


_HALVES = (
    "master weights and moments are fp32, as in 16 bits small steps are lost to rounding; for memory shard them over "
    "more ranks, or use zero_optimization.offload_optimizer"
)

_QUANTIZED = 'give "quantized_training": "int8-dynamic", "int8" or "int4"; for what else it does, use torchao'

DECLINED: Mapping[str, Declined] = {
    # Precision and gradients
    "amp": Declined('it needs apex; use "bf16" or "fp16"'),
    "torch_autocast": Declined('use "bf16" or "fp16", or torch.autocast in your own forward'),
    "fp32_allreduce": _off('give "communication_data_type": "fp32"'),
    "fp16.fp16_master_weights_and_grads": _off(_HALVES),
    "bf16.bf16_master_weights_and_grads": _off(_HALVES),
    "bf16.bf16_optimizer_states": _off(_HALVES),
    "fp16.auto_cast": _off("inputs are yours to cast: give the model tensors in fp16"),
    # ZeRO
    "zero_optimization.zero_quantized_nontrainable_weights": _off('"zero_quantized_weights" carries these too'),
    "zero_optimization.zeropp_loco_param": Declined("residuals are kept whole, and without options", (None,)),
    "zero_optimization.zenflow": Declined("every gradient is stepped with at its own step; delete it", (None,)),
    # Checkpoints
    "nebula": Declined('use "checkpoint": {"async_save": true}'),
    "datastates_ckpt": Declined('use "checkpoint": {"async_save": true}'),
    # Logs and measurements
    "comet": Declined('use "tensorboard", "csv_monitor" or "wandb"'),
    "trackio": Declined('use "tensorboard", "csv_monitor" or "wandb"'),
    "flops_profiler.step": Declined('write "profile_step"', (1,)),
    # What DeepSpeed has and thinwire has not
    "autotuning": Declined("`thinwire plan` predicts step time and memory and recommends a method; delete it"),
    "elasticity": Declined("a checkpoint resumes on any number of ranks; give the batch sizes"),
    "eigenvalue": Declined("it only served quantize_training; delete it"),
    **dict.fromkeys(
        ("tensor_parallel.tp", "tensor_parallel.partition_config", "tensor_parallel.injection_policy_tuple"),
        Declined("thinwire.parallel has plans for models; call torch's parallelize_module for others"),
    ),
    "tensor_parallel.replace_with_kernel_inject": _off("layers are the model's own"),
    "expert_parallel": Declined("every rank holds every expert; delete it"),
    "sequence_parallel_size": Declined("every rank is a data-parallel rank", (1,)),
    "curriculum_learning": Declined("order the data set itself"),
    "data_efficiency": Declined("order the data set itself"),
    "compression_training": Declined(_QUANTIZED),
    "quantize_training": Declined(_QUANTIZED),
    "weight_quantization": Declined(_QUANTIZED),
    "hybrid_engine": Declined("generate with the model itself; delete it"),
}


_FSDP = "stage 3 is FSDP2, which gathers one layer at a time"
_EVERY_BUCKET = "every rank owns a shard of every bucket"
_DERIVED = "buffers, and what is read and written at once, follow from the sizes of the state"
_RECOMPUTED = '"modules" says what is recomputed'
_CHECKPOINT = "a checkpoint is written whole, by all ranks into one folder"


def _idle(kind: Any, why: str, *names: str) -> dict[str, WithoutEffect]:
    return {name: WithoutEffect(kind, why) for name in names}


def _under(section: str, keys: Mapping[str, WithoutEffect]) -> dict[str, WithoutEffect]:
    return {f"{section}.{key}": one for key, one in keys.items()}


_STAGE_3_SIZES = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "module_granularity_threshold",
    "adaptive_prefetch_min_size",
    "adaptive_prefetch_max_size",
)
_STAGE_3_SWITCHES = ("use_all_reduce_for_fetch_params", "allgather_sequential", "adaptive_prefetch_bucket_size")

_ZERO = {
    **_idle(WholeNumber, _FSDP, *_STAGE_3_SIZES, *(f"stage3_{name}" for name in _STAGE_3_SIZES)),
    **_idle(bool, _FSDP, *_STAGE_3_SWITCHES, *(f"stage3_{name}" for name in _STAGE_3_SWITCHES)),
    **_idle(WholeNumber, _FSDP, "sub_group_size", "stage3_partition_stream_chunk_size"),
    **_idle(bool, _FSDP, "memory_efficient_linear", "override_module_apply"),
    **_idle(
        bool,
        "save_16bit_model always gathers the whole weights",
        "gather_16bit_weights_on_model_save",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    ),
    **_idle(bool, "a bucket's gradients are always contiguous", "contiguous_gradients"),
    **_idle(bool, "sharded gradients are always reduce-scattered", "reduce_scatter"),
    **_idle(WholeNumber, "weights are gathered in the buckets in which gradients are reduced", "allgather_bucket_size"),
    **_idle(bool, "a bucket's weights are always gathered at once", "allgather_partitions"),
    **_idle(bool, _EVERY_BUCKET, "use_multi_rank_bucket_allreduce", "round_robin_gradients", "legacy_stage1"),
    **_idle(bool, "a checkpoint always restores the fp32 master weights", "load_from_fp32_weights"),
    **_idle(bool, "a checkpoint loads on any number of ranks", "elastic_checkpoint"),
    **_idle(bool, _CHECKPOINT, "pipeline_loading_checkpoint"),
    **_idle(bool, "it only checks and reports", "log_trace_cache_warnings", "enable_sanity_checks"),
    **_idle(bool, "momentum rests where all state does", "save_muon_momentum_buffer_in_memory"),
    **_idle(WholeNumber, "parameters are sharded over all ranks", "mics_shard_size"),
    **_idle(bool, "parameters are sharded over all ranks", "mics_hierarchical_params_gather"),
}

_OFFLOAD = {
    **_idle(WholeNumber, _DERIVED, "buffer_count", "buffer_size"),
    **_idle(WholeNumber, "parameters rest in memory", "max_in_cpu"),
    **_idle(bool, "reading and writing always overlap the step", "pipeline", "pipeline_read", "pipeline_write"),
    **_idle(bool, "master weights are written once, as they are", "fast_init"),
    **_idle(bool, "a step begins once all gradients have arrived", "super_offload"),
    **_idle(float, "state is offloaded whole", "ratio", "cpuadam_cores_perc"),
}

_ACTIVATIONS = {
    **_idle(
        bool,
        _RECOMPUTED,
        "partition_activations",
        "partitioned_activations",
        "contiguous_memory_optimization",
        "synchronize_checkpoint_boundary",
        "profile",
    ),
    # Published files have false here, for none.
    **_idle(WholeNumber | bool | None, _RECOMPUTED, "number_checkpoints"),
}

_CHECKPOINTS = {
    **_idle(bool, "a checkpoint always loads on any number of ranks", "load_universal"),
    **_idle(bool, _CHECKPOINT, "use_node_local_storage", "checkpoint_serialization"),
    **_idle(Object | None, _CHECKPOINT, "parallel_write", "writer"),
}

_PIPELINE = {
    **_idle(str | None, 'the PipelineModule, or "split", says how stages are cut', "partition"),
    **_idle(bool, "the PipelineModule says whether layers have seeds of their own", "seed_layers"),
    **_idle(bool, "tensors travel whole, or in the codecs that are named", "pipe_partitioned", "grad_partitioned"),
    **_idle(WholeNumber, _RECOMPUTED, "activation_checkpoint_interval"),
    **_idle(bool, "recomputation is never reentrant", "use_reentrant"),
}

_TENSOR_PARALLEL = {
    **_idle(str | None, "the model's class says which layers are cut", "preset_model"),
    **_idle(str | None, "weights are cut in the dtype that they have", "dtype"),
    **_idle(bool, "sums over the ranks of a layer are waited for", "tp_overlap_comm"),
    **_idle(bool, "the model is cut on its device", "keep_module_on_host"),
}

WITHOUT_EFFECT: Mapping[str, WithoutEffect] = {
    # Published files have 0 and 1 here.
    **_idle(WholeNumber | bool, "any elementwise optimizer runs sharded", "zero_allow_untested_optimizer"),
    **_idle(bool, "offloaded state is stepped by torch's own optimizer", "zero_force_ds_cpu_optimizer"),
    **_idle(WholeNumber, "the buckets are those of zero_optimization", "allgather_size"),
    **_idle(bool, "weights are gathered after every step that moves a shard", "disable_allgather"),
    **_idle(bool, "gradients travel dense", "sparse_gradients"),
    **_idle(
        str | None,
        "there is no sequence parallelism",
        "seq_parallel_communication_data_type",
        "seq_parallel_comm_data_type",
    ),
    **_idle(bool, "there are no experts in parallel", "use_data_before_expert_parallelism"),
    **_idle(Object | None, "call torch.compile on the model for speed", "compile"),
    **_idle(bool, "call torch.compile on the model for speed", "graph_harvesting"),
    **_idle(Object | None, _DERIVED, "aio"),
    **_idle(bool, "engine.settings.describe() returns it", "dump_state"),
    **_idle(Object | None, '"wall_clock_breakdown" times steps', "timers"),
    **_idle(WholeNumber | None, "it only made DeepSpeed warn", "vocabulary_size"),
    **_idle(bool, "master weights are always flat", "optimizer.legacy_fusion", "fp16.fused_mode"),
    **_idle(bool, "Adam is always torch's", "optimizer.torch_adam"),
    **_idle(bool, "gradients leave as soon as their bucket is complete", "bf16.immediate_grad_update"),
    **_under("zero_optimization", _ZERO),
    **_under("zero_optimization.offload_optimizer", _OFFLOAD),
    **_under("zero_optimization.offload_param", _OFFLOAD),
    **_under("activation_checkpointing", _ACTIVATIONS),
    **_under("checkpoint", _CHECKPOINTS),
    **_under("pipeline", _PIPELINE),
    **_under("tensor_parallel", _TENSOR_PARALLEL),
}

PARAMETERS_DECLINED: Mapping[str, Declined] = {
    "optimizer.amsgrad": Declined("the optimizer keeps no maximum of a variance", (False,)),
    "optimizer.eps_inside_sqrt": Declined("eps is added to the root; use the class without the engine", (False,)),
    "optimizer.exp_avg_mask": Declined("give it in a parameter group of the class itself"),
    "optimizer.max_grad_norm": Declined('use "gradient_clipping"', (0, 0.0, None)),
    "optimizer.adam_w_mode": Declined('use "Adam", which "adam_w_mode" is for', (True,)),
    "optimizer.bias_correction": Declined('use "Adam" or "AdamW", which "bias_correction" is for', (True,)),
    "optimizer.fp32_optimizer_states": Declined("optimizer state is fp32", (True,)),
    "optimizer.ns_method": Declined("it is torch's iteration, on the whole matrix", ("standard",)),
    "scheduler.last_batch_iteration": Declined("a checkpoint says where to resume", (-1,)),
    "scheduler.verbose": Declined('use "steps_per_print"', (False,)),
}
"""Parameters of sections, where the class that the section names has none of that name."""


def parameters_without_effect(name: str, communicates: bool) -> dict[str, WithoutEffect]:
    """Parameters of the optimizer of this name that cannot change a step."""
    found = {"set_grad_none": WithoutEffect(bool, "gradients are always set to None after a step")}
    if communicates:
        found["cuda_aware"] = WithoutEffect(
            bool, "whether MPI can send from GPU memory is found out; THINWIRE_MPI_CUDA_AWARE overrules that"
        )
    else:
        found["torch_adam"] = WithoutEffect(bool, "Adam is always torch's")
    if name == "AdamW":
        found["adam_w_mode"] = WithoutEffect(bool, "AdamW decouples its weight decay, as in DeepSpeed")
    return found
