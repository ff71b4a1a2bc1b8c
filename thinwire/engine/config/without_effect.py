"""DeepSpeed's keys that cannot make a result worse or other here: how much moves at a time, how long something is
kept, what is printed. Any well-typed value is accepted, and the job says once which of them a configuration holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.engine.config.errors import shown
from thinwire.engine.config.params import Expected

__all__ = ["WITHOUT_EFFECT", "WithoutEffect"]


@dataclass(frozen=True)
class WithoutEffect:
    """A key of DeepSpeed's that changes nothing. `kind`: what it takes, written as an annotation; "auto" is taken too.
    `why`: what happens whatever its value is."""

    kind: str
    why: str

    def problem(self, path: str, value: Any) -> str | None:
        """The sentence that refuses a `value` of a wrong type; None for all others."""
        if value == "auto" and isinstance(value, str):
            return None
        try:
            Expected(self.kind).convert(value)
        except TypeError as error:
            return f'"{path}" must be {error}, got {shown(value)}'
        return None


_FSDP = "stage 3 is FSDP2, which gathers one layer at a time"
_EVERY_BUCKET = "every rank owns a shard of every bucket"
_HALVES = "{what} stay in fp32: more memory than asked for, and no less precision"
_NOT_NVME = "state is offloaded to CPU memory, whole"
_RECOMPUTED = '"modules" says what is recomputed'
_CHECKPOINT = "a checkpoint is written whole, by all ranks into one folder"


def _off(kind: str, why: str, *names: str) -> dict[str, WithoutEffect]:
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
)
_STAGE_3_SWITCHES = ("use_all_reduce_for_fetch_params", "allgather_sequential")

_ZERO = {
    **_off("int", _FSDP, *_STAGE_3_SIZES, *(f"stage3_{name}" for name in _STAGE_3_SIZES)),
    **_off("bool", _FSDP, *_STAGE_3_SWITCHES, *(f"stage3_{name}" for name in _STAGE_3_SWITCHES)),
    **_off("int", _FSDP, "sub_group_size", "stage3_partition_stream_chunk_size"),
    **_off("bool", _FSDP, "memory_efficient_linear", "override_module_apply"),
    **_off("dict | None", _FSDP, "leaf_module"),
    **_off(
        "bool",
        "save_16bit_model always gathers the whole weights",
        "gather_16bit_weights_on_model_save",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    ),
    **_off("bool", "a bucket's gradients are always contiguous", "contiguous_gradients"),
    **_off("bool", "sharded gradients are always reduce-scattered", "reduce_scatter"),
    **_off("int", "weights are gathered in the buckets in which gradients are reduced", "allgather_bucket_size"),
    **_off("bool", "a bucket's weights are always gathered at once", "allgather_partitions"),
    **_off("bool", _EVERY_BUCKET, "use_multi_rank_bucket_allreduce", "round_robin_gradients", "legacy_stage1"),
    **_off("bool", "a checkpoint always restores the fp32 master weights", "load_from_fp32_weights"),
    **_off("bool", "a checkpoint loads on any number of ranks", "elastic_checkpoint"),
    **_off("bool", _CHECKPOINT, "pipeline_loading_checkpoint"),
    **_off("bool", "it only checks and reports", "log_trace_cache_warnings", "enable_sanity_checks"),
    **_off("bool", "momentum is never moved to NVMe", "save_muon_momentum_buffer_in_memory"),
    **_off("int", "every shard lies on one rank, with no second copy inside a node", "zero_hpz_partition_size"),
    **_off("int", "parameters are sharded over all ranks", "mics_shard_size"),
    **_off("bool", "parameters are sharded over all ranks", "mics_hierarchical_params_gather"),
}

_OFFLOAD = {
    **_off("str | None", _NOT_NVME, "nvme_path"),
    **_off("int", _NOT_NVME, "buffer_count", "buffer_size", "max_in_cpu"),
    **_off("bool", _NOT_NVME, "fast_init", "pipeline", "pipeline_read", "pipeline_write", "super_offload"),
    **_off("float", _NOT_NVME, "ratio", "cpuadam_cores_perc"),
}

_ACTIVATIONS = {
    **_off(
        "bool",
        _RECOMPUTED,
        "partition_activations",
        "partitioned_activations",
        "contiguous_memory_optimization",
        "synchronize_checkpoint_boundary",
        "profile",
    ),
    # Published files have false here, for none.
    **_off("int | bool | None", _RECOMPUTED, "number_checkpoints"),
}

_CHECKPOINTS = {
    **_off("bool", "a checkpoint always loads on any number of ranks", "load_universal"),
    **_off("bool", _CHECKPOINT, "use_node_local_storage", "checkpoint_serialization"),
    **_off("dict | None", _CHECKPOINT, "parallel_write", "writer"),
}

WITHOUT_EFFECT: Mapping[str, WithoutEffect] = {
    # Published files have 0 and 1 here.
    **_off("int | bool", "any elementwise optimizer runs sharded", "zero_allow_untested_optimizer"),
    **_off("bool", "offloaded state is stepped by torch's own optimizer", "zero_force_ds_cpu_optimizer"),
    **_off("int", "the buckets are those of zero_optimization", "allgather_size"),
    **_off("bool", "weights are gathered after every step that moves a shard", "disable_allgather"),
    **_off("bool", "gradients travel dense", "sparse_gradients"),
    **_off(
        "str | None",
        "there is no sequence parallelism",
        "seq_parallel_communication_data_type",
        "seq_parallel_comm_data_type",
    ),
    **_off("bool", "there are no experts in parallel", "use_data_before_expert_parallelism"),
    **_off("dict | None", "the model runs whole on every rank", "pipeline"),
    **_off("dict | None", "call torch.compile on the model for speed", "compile"),
    **_off("bool", "call torch.compile on the model for speed", "graph_harvesting"),
    **_off("dict | None", "state is not offloaded to NVMe", "aio"),
    **_off("bool", "engine.settings.describe() returns it", "dump_state"),
    **_off("str | None", "Python's logging has the level", "log_level"),
    **_off("dict | None", '"wall_clock_breakdown" times steps', "timers"),
    **_off("int | None", "it only made DeepSpeed warn", "vocabulary_size"),
    **_off("bool", "master weights are always flat", "optimizer.legacy_fusion", "fp16.fused_mode"),
    **_off("bool", "Adam is always torch's", "optimizer.torch_adam"),
    **_off("bool", _HALVES.format(what="master weights"), "fp16.fp16_master_weights_and_grads"),
    **_off("bool", _HALVES.format(what="master weights"), "bf16.bf16_master_weights_and_grads"),
    **_off("bool", _HALVES.format(what="moments"), "bf16.bf16_optimizer_states"),
    **_off("bool", "gradients leave as soon as their bucket is complete", "bf16.immediate_grad_update"),
    **_off("bool", "gradients that are not finite always end the step with an error", "bf16.check_grad_overflow"),
    **_under("zero_optimization", _ZERO),
    **_under("zero_optimization.offload_optimizer", _OFFLOAD),
    **_under("zero_optimization.offload_param", _OFFLOAD),
    **_under("activation_checkpointing", _ACTIVATIONS),
    **_under("checkpoint", _CHECKPOINTS),
}
