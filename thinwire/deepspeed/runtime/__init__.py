"""deepspeed.runtime: the engine and what it is made of."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    (
        "activation_checkpointing",
        "bf16_optimizer",
        "comm",
        "config",
        "config_utils",
        "dataloader",
        "engine",
        "fp16",
        "lr_schedules",
        "pipe",
        "precision_config",
        "progressive_layer_drop",
        "swap_tensor",
        "utils",
        "zero",
    ),
)
