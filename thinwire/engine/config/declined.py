"""DeepSpeed's keys that have no switch in thinwire, one by one: which of their values describe what happens anyway,
and what to do where another is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.engine.config.errors import shown

__all__ = ["DECLINED", "Declined"]


@dataclass(frozen=True)
class Declined:
    """A key of DeepSpeed's that cannot be set. `matches`: values that ask for nothing else than what happens anyway.
    Of a section that has `"enabled": false`, nothing is asked either. `instead`: what happens, or what to do."""

    instead: str
    matches: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        """Whether `value` asks for what happens anyway, so that it can be dropped."""
        if isinstance(value, Mapping):
            return value.get("enabled") in (False, "auto")
        return any(type(value) is type(match) and value == match for match in self.matches)

    def refusal(self, path: str, value: Any) -> str:
        """The sentence that refuses `value`."""
        if self.matches and "auto" not in self.matches:
            expected = " or ".join(shown(match) for match in self.matches)
            return f'"{path}" can only be {expected}, got {shown(value)}: {self.instead}'
        return f'"{path}" is not supported: {self.instead}'


def _off(instead: str) -> Declined:
    return Declined(instead, matches=(False,))


def _always(instead: str) -> Declined:
    return Declined(instead, matches=(True,))


_DELETE = "delete it"
_FSDP = Declined("stage 3 is FSDP2, which gathers one layer at a time and has no such number; delete it", ("auto",))
_NVME = Declined("thinwire offloads to CPU memory only; delete it")

DECLINED: Mapping[str, Declined] = {
    # Precision and gradients
    "amp": Declined('it needs apex; use "bf16" or "fp16"'),
    "torch_autocast": Declined('use "bf16" or "fp16", or torch.autocast in your own forward'),
    "bfloat16": Declined('write "bf16"'),
    "seq_parallel_comm_data_type": Declined("there is no sequence parallelism; delete it"),
    "sparse_gradients": _off("gradients are dense; use sparse=False in torch.nn.Embedding"),
    "disable_allgather": _off("weights are always gathered after a step"),
    "managed_gradient_accumulation": _always("the engine counts micro-batches; use engine.no_sync() for your own"),
    "fp16.auto_cast": _off("inputs are yours to cast"),
    "fp16.fused_mode": _always("master weights are always flat"),
    "fp16.fp16_master_weights_and_grads": _off("master weights are fp32"),
    "bf16.immediate_grad_update": Declined("gradients leave as soon as their bucket is complete; delete it"),
    "bf16.check_grad_overflow": _always("a step whose gradients are not finite is always skipped"),
    "bf16.bf16_master_weights_and_grads": _off("master weights are fp32"),
    "bf16.bf16_optimizer_states": _off("optimizer state is fp32"),
    # Optimizer
    "optimizer.legacy_fusion": _off("master weights are always flat"),
    "zero_allow_untested_optimizer": _always("any elementwise optimizer runs sharded"),
    "zero_force_ds_cpu_optimizer": _off("offloaded state is stepped by torch's own optimizer"),
    # ZeRO
    "zero_optimization.contiguous_gradients": _always("a bucket's gradients are always contiguous"),
    "zero_optimization.reduce_scatter": _always("sharded gradients are always reduce-scattered"),
    "zero_optimization.allgather_partitions": _always("a bucket's weights are always gathered at once"),
    "zero_optimization.use_multi_rank_bucket_allreduce": _always("every rank owns a shard of every bucket"),
    "zero_optimization.round_robin_gradients": _off("every rank owns a shard of every bucket"),
    "zero_optimization.load_from_fp32_weights": _always("a checkpoint always restores the fp32 master weights"),
    "zero_optimization.ignore_unused_parameters": _always("a parameter without a gradient is left alone"),
    "zero_optimization.legacy_stage1": _off(_DELETE),
    "zero_optimization.elastic_checkpoint": _always("a checkpoint loads on any number of ranks"),
    "zero_optimization.cpu_offload": _off('write "offload_optimizer": {"device": "cpu"}'),
    "zero_optimization.cpu_offload_param": _off('write "offload_param": {"device": "cpu"}'),
    "zero_optimization.cpu_offload_use_pin_memory": _off('write "pin_memory" in "offload_optimizer"'),
    "zero_optimization.stage3_prefetch_bucket_size": _FSDP,
    "zero_optimization.stage3_param_persistence_threshold": _FSDP,
    "zero_optimization.stage3_model_persistence_threshold": _FSDP,
    "zero_optimization.stage3_max_live_parameters": _FSDP,
    "zero_optimization.stage3_max_reuse_distance": _FSDP,
    "zero_optimization.stage3_module_granularity_threshold": _FSDP,
    "zero_optimization.stage3_partition_stream_chunk_size": _FSDP,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _off("stage 3 gathers by all-gather"),
    "zero_optimization.stage3_allgather_sequential": _off("stage 3 gathers a layer's parameters together"),
    "zero_optimization.sub_group_size": _FSDP,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Declined(
        "save_16bit_model always gathers the whole weights", (True, "auto")
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _always(
        "save_16bit_model always gathers the whole weights"
    ),
    "zero_optimization.memory_efficient_linear": _off("stage 3 is FSDP2, which leaves torch.nn.Linear as it is"),
    "zero_optimization.override_module_apply": _off("stage 3 is FSDP2, which leaves Module.apply as it is"),
    "zero_optimization.pipeline_loading_checkpoint": _off(_DELETE),
    "zero_optimization.log_trace_cache_warnings": _off(_DELETE),
    "zero_optimization.enable_sanity_checks": _off(_DELETE),
    "zero_optimization.zero_hpz_partition_size": Declined("ZeRO++ is not; OneBitAdam sends less", (1,)),
    "zero_optimization.zero_quantized_weights": _off("ZeRO++ is not supported; OneBitAdam sends less"),
    "zero_optimization.zero_quantized_nontrainable_weights": _off("ZeRO++ is not supported"),
    "zero_optimization.zero_quantized_gradients": _off("ZeRO++ is not supported; OneBitAdam sends less"),
    "zero_optimization.zeropp_loco_param": Declined("ZeRO++ is not; OneBitAdam sends less"),
    "zero_optimization.mics_shard_size": Declined("MiCS is not supported", (-1,)),
    "zero_optimization.mics_hierarchical_params_gather": _off("MiCS is not supported"),
    "zero_optimization.zenflow": Declined("delete it"),
    "zero_optimization.leaf_module": Declined("stage 3 is FSDP2, which needs no such list; delete it"),
    **{
        f"zero_optimization.{section}.{key}": _NVME
        for section in ("offload_optimizer", "offload_param")
        for key in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "fast_init")
    },
    "zero_optimization.offload_optimizer.pipeline": _off("master weights are stepped shard by shard"),
    "zero_optimization.offload_optimizer.pipeline_read": _off("master weights are stepped shard by shard"),
    "zero_optimization.offload_optimizer.pipeline_write": _off("master weights are stepped shard by shard"),
    "zero_optimization.offload_optimizer.ratio": Declined("all of the state is offloaded or none", (1.0, 1)),
    "zero_optimization.offload_optimizer.super_offload": _off(_DELETE),
    # Activation checkpointing
    "activation_checkpointing.partition_activations": _off("there is no tensor parallelism to partition over"),
    "activation_checkpointing.contiguous_memory_optimization": _off(_DELETE),
    "activation_checkpointing.number_checkpoints": Declined('name what to recompute in "modules"', (None,)),
    "activation_checkpointing.synchronize_checkpoint_boundary": _off(_DELETE),
    "activation_checkpointing.profile": _off('use "wall_clock_breakdown"'),
    # Checkpoints
    "checkpoint.tag_validation": Declined("ranks that save under different tags are always an error", ("Fail", "FAIL")),
    "checkpoint.load_universal": _always("a checkpoint always loads on any number of ranks"),
    "checkpoint.use_node_local_storage": _off("every rank reads and writes the same folder"),
    "checkpoint.parallel_write": Declined("every rank always writes its own share; delete it"),
    "nebula": Declined('use "checkpoint": {"async_save": true}'),
    "datastates_ckpt": Declined('use "checkpoint": {"async_save": true}'),
    # Logs and measurements
    "wandb": Declined('use "tensorboard" or "csv_monitor"'),
    "comet": Declined('use "tensorboard" or "csv_monitor"'),
    "trackio": Declined('use "tensorboard" or "csv_monitor"'),
    "dump_state": _off("print engine.settings.describe()"),
    "log_level": Declined("set the level in Python's logging"),
    "flops_profiler": Declined('use "wall_clock_breakdown", or torch.utils.flop_counter'),
    "comms_logger": Declined("read bytes_sent of the optimizer"),
    "timers": Declined('use "wall_clock_breakdown"'),
    # What DeepSpeed has and thinwire has not
    "autotuning": Declined("delete it"),
    "elasticity": Declined("a checkpoint resumes on any number of ranks; give the batch sizes"),
    "aio": Declined("thinwire offloads to CPU memory only; delete it"),
    "eigenvalue": Declined("delete it"),
    "pipeline": Declined("use torch.distributed.pipelining"),
    "tensor_parallel": Declined("use torch.distributed.tensor.parallel"),
    "expert_parallel": Declined("delete it"),
    "use_data_before_expert_parallelism": _off(_DELETE),
    "sequence_parallel_size": Declined("every rank is a data-parallel rank", (1,)),
    "curriculum_learning": Declined("order the data set itself"),
    "data_efficiency": Declined("order the data set itself"),
    "compression_training": Declined("use torchao"),
    "quantize_training": Declined("use torchao"),
    "weight_quantization": Declined("use torchao"),
    "hybrid_engine": Declined("delete it"),
    "compile": Declined("call torch.compile on the model"),
    "graph_harvesting": _off("call torch.compile on the model"),
    "vocabulary_size": Declined("it only made DeepSpeed warn; delete it"),
}
