"""Attributes that an engine refuses by name, and why: what its model has and the engine cannot follow, and what
DeepSpeed's engine has and nothing here stands for."""

from __future__ import annotations

__all__ = ["CHANGES_A_MODEL", "why_foreign"]

CHANGES_A_MODEL = frozenset(
    {
        "bfloat16",
        "cpu",
        "cuda",
        "double",
        "float",
        "half",
        "load_state_dict",
        "requires_grad_",
        "to",
        "to_empty",
        "type",
    }
)
"""A model's methods that its optimizer, which holds the weights too, would not follow."""

_NO_OTHER_PARALLELISM = "thinwire has data parallelism alone, over the ranks of engine.comm"
_NO_GROUP = "thinwire's ranks need no torch process group: engine.comm has them"

# DeepSpeed's attributes of an engine that would have nothing to say here -> what to use, or why there is none.
_FOREIGN = {
    "amp_params": "apex is not used; bf16 and fp16 are",
    "autotuning_enabled": "`thinwire plan` says what suits a cluster, without trial runs",
    "data_parallel_group": _NO_GROUP,
    "expert_data_parallel_group": _NO_OTHER_PARALLELISM,
    "expert_parallel_group": _NO_OTHER_PARALLELISM,
    "get_sequence_parallel_group": _NO_OTHER_PARALLELISM,
    "mpu": _NO_OTHER_PARALLELISM,
    "seq_data_parallel_group": _NO_GROUP,
    "zero_hpz_partition_size": "stage 3 gathers over all ranks",
    "zero_max_live_parameters": "stage 3 gathers a layer at a time, and no number limits it",
    "zero_max_reuse_distance": "stage 3 gathers a layer at a time, and no number limits it",
    "zero_model_persistence_threshold": "stage 3 shards every parameter",
    "zero_param_persistence_threshold": "stage 3 shards every parameter",
    "zero_prefetch_bucket_size": "stage 3 gathers a layer at a time, the next one while it computes",
    "zero_quantized_gradients": "what compresses gradients is the optimizer: OneBitAdam and its kin",
    "zero_quantized_weights": "weights are gathered in the dtype that they compute in",
    "zero_sub_group_size": "each bucket is stepped by itself; zero_reduce_bucket_size() is its size",
}


def why_foreign(name: str) -> str | None:
    """Why an engine has no such attribute, where DeepSpeed's has it; None for any other name."""
    return f"an engine has no {name}: {_FOREIGN[name]}" if name in _FOREIGN else None
