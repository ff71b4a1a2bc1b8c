"""deepspeed.checkpointing: activations that are computed again in backward, by torch.utils.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from thinwire.deepspeed.lazy_names import NotOfferedError

__all__ = ["checkpoint", "configure", "is_configured", "model_parallel_cuda_manual_seed", "non_reentrant_checkpoint"]


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)`, and keep of it what it was given only: backward calls it again.

    Random numbers are the same both times.
    """
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Accept DeepSpeed's call: `checkpoint` needs no configuration, and the defaults are what it does.

    Raises NotOfferedError for what it does not do: activations partitioned among ranks of a model, or kept on CPU,
    which the configuration's "activation_checkpointing" has by the names of modules.
    """
    if partition_activations:
        raise NotOfferedError("partition_activations: thinwire has no model parallelism; leave it out")
    if checkpoint_in_cpu:
        raise NotOfferedError(
            "checkpoint_in_cpu: name the modules in the configuration instead, "
            '"activation_checkpointing": {"modules": ["BertLayer"], "cpu_checkpointing": true}'
        )


def is_configured() -> bool:
    """Always: there is nothing to configure."""
    return True


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed every device; without model parallelism there is one seed."""
    torch.manual_seed(seed)
