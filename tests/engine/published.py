"""Configurations that DeepSpeed, its examples and Hugging Face publish, key by key as people have them."""

from __future__ import annotations

from typing import Any

__all__ = ["AS_TEXT", "FILES", "ZERO_2", "ZERO_3"]

_WIRE: dict[str, Any] = {"cuda_aware": False, "comm_backend_name": "nccl"}
_DYNAMIC: dict[str, Any] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
_LAMB: dict[str, Any] = {"weight_decay": 0.01, "bias_correction": False, "max_coeff": 0.3, "min_coeff": 0.01}
_FACTORS: dict[str, Any] = {"coeff_beta": 0.9, "factor_max": 4.0, "factor_min": 0.5, "factor_threshold": 0.1}


def _bert(micro: int, optimizer: str, params: dict[str, Any], fp16: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """As the files for BERT pre-training have it."""
    return {
        "train_batch_size": 4096,
        "train_micro_batch_size_per_gpu": micro,
        "steps_per_print": 100,
        "prescale_gradients": False,
        "optimizer": {"type": optimizer, "params": params},
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": False,
        "fp16": fp16,
        **changes,
    }


FILES: dict[str, dict[str, Any]] = {
    # DeepSpeedExamples, BingBertSquad/1-bit_adam
    "squad, 1-bit Adam": {
        "train_batch_size": 96,
        "train_micro_batch_size_per_gpu": 3,
        "steps_per_print": 100,
        "optimizer": {
            "type": "OnebitAdam",
            "params": {"lr": 3e-5, "freeze_step": 400, "weight_decay": 0.0, "bias_correction": False, **_WIRE},
        },
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True},
    },
    # DeepSpeedExamples, bing_bert/01_adam
    "bert, 0/1 Adam": _bert(
        16,
        "ZeroOneAdam",
        {
            "lr": 4e-4,
            "weight_decay": 0.01,
            "bias_correction": False,
            "var_freeze_step": 12500,
            "local_step_scaler": 32678,
            **_WIRE,
        },
        _DYNAMIC,
    ),
    # DeepSpeedExamples, bing_bert/1-bit_lamb
    "bert, 1-bit LAMB": _bert(
        64,
        "OneBitLamb",
        {"lr": 11e-3, **_LAMB, "freeze_step": 1000, **_WIRE, **_FACTORS},
        _DYNAMIC,
        train_batch_size=65536,
        steps_per_print=1000,
    ),
    # DeepSpeedExamples, bing_bert; without the section that progressive layer drop's tutorial adds
    "bert, Adam": _bert(
        16,
        "Adam",
        {"lr": 1e-3, "weight_decay": 0.01, "bias_correction": False},
        {"enabled": True, "loss_scale": 0},
        prescale_gradients=True,
        gradient_predivide_factor=8,
    ),
    # DeepSpeed's tutorial of BERT pre-training
    "bert, Adam of the tutorial": {
        "train_batch_size": 4096,
        "train_micro_batch_size_per_gpu": 64,
        "steps_per_print": 1000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 2e-4, "max_grad_norm": 1.0, "weight_decay": 0.01, "bias_correction": False},
        },
        "fp16": _DYNAMIC,
    },
    # DeepSpeedExamples, cifar
    "cifar": {
        "train_batch_size": 4,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "fp16": {
            "enabled": True,
            "fp16_master_weights_and_grads": True,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": True,
        },
    },
    # DeepSpeed's CIFAR-10 tutorial
    "cifar of the tutorial": {
        "train_batch_size": 4,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "wall_clock_breakdown": False,
    },
    "cifar, 1-bit LAMB": {
        "train_batch_size": 1024,
        "train_micro_batch_size_per_gpu": 16,
        "steps_per_print": 1000,
        "prescale_gradients": False,
        "optimizer": {
            "type": "OneBitLamb",
            "params": {"lr": 5e-3, **_LAMB, "freeze_step": 1000, **_WIRE, **_FACTORS, "factor_max": 2.0},
        },
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": False,
        "fp16": {"enabled": False, "loss_scale": 0},
    },
}

# DeepSpeed's tutorial of 1-bit Adam has a comma too many.
AS_TEXT = """{
  "train_batch_size": 4096,
  "train_micro_batch_size_per_gpu": 16,
  "optimizer": {
    "type": "OneBitAdam",
    "params": {"lr": 4e-4, "freeze_step": 23000, "cuda_aware": false, "comm_backend_name": "nccl"}
  },
  "fp16": {
    "enabled": true,
  }
}
"""

_FILLED_IN: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
}
_PINNED = {"device": "cpu", "pin_memory": True}

# transformers, tests/deepspeed
ZERO_2: dict[str, Any] = _FILLED_IN | {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": _PINNED,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
}
ZERO_3: dict[str, Any] = _FILLED_IN | {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": _PINNED,
        "offload_param": _PINNED,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e14,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_fp16_weights_on_model_save": True,
    },
}
