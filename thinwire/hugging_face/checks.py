"""What arguments and optimizers of a Trainer must be: refused before anything is trained, rather than ignored."""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

__all__ = ["check_arguments", "check_optimizer", "synchronized"]


def synchronized(optimizer: Any) -> SynchronizedOptimizer:
    """The thinwire optimizer in what Accelerate has wrapped; TypeError where it is another."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, SynchronizedOptimizer):
        raise TypeError(
            f"TrainerMixin trains with a thinwire optimizer, got {type(optimizer).__name__}: pass "
            "optimizer_cls_and_kwargs=(thinwire.OneBitAdam, {}) or optimizers=(optimizer, schedule), or use the "
            "Trainer without the mixin"
        )
    return optimizer


def check_arguments(arguments: Any) -> None:
    """Raise ValueError for TrainingArguments that a thinwire optimizer cannot honour."""
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        if getattr(arguments, name, None):
            raise ValueError(
                f"{name} divides the model or its gradients among ranks itself, and a thinwire optimizer needs both "
                "whole on every rank: leave it out; stage=1 or stage=2 of OneBitAdam shards the optimizer's state"
            )
    if arguments.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size starts again in the middle of a step, on a rank that other ranks are waiting for: "
            "set per_device_train_batch_size"
        )
    accumulation = arguments.accelerator_config.gradient_accumulation_kwargs or {}
    if accumulation.get("sync_each_batch"):
        raise ValueError(
            "sync_each_batch sends the gradient of every micro-batch, and a compressed gradient can leave once a step: "
            "remove it from gradient_accumulation_kwargs"
        )


def check_optimizer(optimizer: Any, arguments: Any) -> None:
    """Raise TypeError or ValueError for an optimizer that does not go with these TrainingArguments."""
    ours = synchronized(optimizer)
    name = type(ours).__name__
    if ours.comm.size != arguments.world_size:
        raise ValueError(
            f"{name} has {ours.comm.size} ranks and the Trainer {arguments.world_size}, so that ranks would not share "
            "the data out: start the job with torchrun or accelerate launch"
        )
    if ours.max_norm != arguments.max_grad_norm:
        raise ValueError(
            f"max_grad_norm is {arguments.max_grad_norm} in TrainingArguments, whose default is 1.0, and max_norm of "
            f"{name} is {ours.max_norm}: give both the same, as the optimizer clips for the Trainer"
        )
    if arguments.fp16 and getattr(ours, "stage", 0) == 2:
        raise ValueError(
            "fp16=True steps through a GradScaler, which cannot look at gradients that stage 2 has sent to their "
            "owners: use stage=1, or bf16=True"
        )
