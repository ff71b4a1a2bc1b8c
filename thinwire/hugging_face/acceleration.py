"""An accelerator that leaves gradients to a thinwire optimizer, wraps no model in DistributedDataParallel and does not
clip; and what a Trainer's arguments and optimizers must be: refused before anything is trained, rather than ignored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from thinwire.comm.agreement import on_every_rank
from thinwire.optim.optimizer import CompressedOptimizer
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer
from thinwire.zero.training_loops import refuse_late_workers

_NOT_WITH_AN_ENGINE = {
    "torch_compile": "call model.compile() before you pass the model",
    "fp16_full_eval": "the engine evaluates in the precision it trains in; use fp16",
    "bf16_full_eval": "the engine evaluates in the precision it trains in; use bf16",
    "save_on_each_node": "whole weights are on rank 0 alone; save to a file system that all nodes share",
}


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
                "whole on every rank: leave it out; stage=1 or stage=2 of OneBitAdam shards the optimizer's state, and "
                "thinwire_config the model too"
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


def check_engine_arguments(arguments: Any, ranks: int, names_schedule: bool) -> None:
    """Raise ValueError for TrainingArguments that the engine cannot honour.

    `ranks`: the engine's. `names_schedule`: whether its configuration has a schedule.
    """
    if ranks != arguments.world_size:
        raise ValueError(
            f"the engine has {ranks} ranks and the Trainer {arguments.world_size}, so that ranks would not share the "
            "data out: start the job with torchrun or accelerate launch"
        )
    if arguments.n_gpu > 1:
        raise ValueError(f"one process with {arguments.n_gpu} GPUs: start one a GPU, by torchrun or accelerate launch")
    for name, instead in _NOT_WITH_AN_ENGINE.items():
        if getattr(arguments, name, None):
            raise ValueError(f"{name} does not go with thinwire_config: {instead}")
    if arguments.save_only_model and arguments.load_best_model_at_end:
        raise ValueError(
            "save_only_model leaves out the engine's checkpoints, from which load_best_model_at_end loads: choose one"
        )
    kind = str(arguments.lr_scheduler_type.value)
    if kind in ("reduce_lr_on_plateau", "greedy") and not names_schedule:
        raise ValueError(
            f"lr_scheduler_type {kind!r} needs a metric, and the engine steps the schedule without one: take another"
        )


def check_optimizer(optimizer: Any, arguments: Any) -> None:
    """Raise TypeError or ValueError for an optimizer that does not go with these TrainingArguments."""
    ours = synchronized(optimizer)
    name = type(ours).__name__
    if ours.comes_and_goes:
        refuse_late_workers("the Trainer")
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


def check_freeze(optimizer: Any, schedule: Any, total_steps: int) -> None:
    """Raise ValueError, on every rank, where a variance would be frozen before the learning rate is at its highest, or
    within the first of `total_steps`. Collective."""
    if isinstance(optimizer, CompressedOptimizer):
        check = partial(optimizer.check_schedule, schedule, total_steps)
        on_every_rank(optimizer.comm, check, "begin training", (ValueError,))


def adapt_accelerator(accelerator: Accelerator, check: Callable[[torch.optim.Optimizer], None]) -> None:
    """Replace what an accelerator does with gradients.

    `check`: called with each optimizer before it is prepared, on every rank; raises what is wrong with it.
    """

    def prepare_optimizer(
        optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap the optimizer. Its state is where its parameters are, so that nothing has to be placed."""
        del device_placement
        prepared = optimizer
        if not isinstance(optimizer, AcceleratedOptimizer):
            check(optimizer)
            prepared = _ReportingOptimizer(optimizer, device_placement=False, scaler=accelerator.scaler)
        if prepared not in accelerator._optimizers:
            accelerator._optimizers.append(prepared)
        return prepared

    @contextmanager
    def no_sync(model: nn.Module) -> Iterator[None]:
        del model
        with ExitStack() as stack:
            for optimizer in accelerator._optimizers:
                stack.enter_context(synchronized(optimizer).no_sync())
            yield

    def clippers() -> Iterator[tuple[str, float, str]]:
        for optimizer in map(synchronized, accelerator._optimizers):
            yield type(optimizer).__name__, optimizer.max_norm, "build the optimizer with that max_norm="

    leave_models_and_clipping(accelerator, clippers)
    accelerator.prepare_optimizer = prepare_optimizer
    accelerator.no_sync = no_sync


def leave_models_and_clipping(
    accelerator: Accelerator, clippers: Callable[[], Iterable[tuple[str, float, str]]]
) -> None:
    """Have an accelerator place models, and wrap their forward for mixed precision, as for evaluation, without DDP, and
    leave clipping to what clips the averaged gradient in its step.

    `clippers`: of each what it is called, its largest 2-norm, and how to have another.
    """
    own: Callable[..., nn.Module] = accelerator.prepare_model

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Return NaN, as the norm is not known yet."""
        del parameters
        for name, largest, instead in clippers():
            if (max_norm != math.inf and max_norm != largest) or norm_type != 2:
                raise ValueError(
                    f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}) was called, and {name} clips the "
                    f"averaged gradient to a 2-norm of {largest}: {instead}"
                )
        return torch.tensor(math.nan)

    def clip_grad_value_(parameters: Any, clip_value: float) -> None:
        raise RuntimeError(
            "clip_grad_value_() comes after the gradients have left for the other ranks, so that it would change "
            "nothing: clip by norm, with max_grad_norm of TrainingArguments"
        )

    def prepare_model(
        model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        del evaluation_mode
        return own(model, device_placement, evaluation_mode=True)

    accelerator.prepare_model = prepare_model
    accelerator.clip_grad_norm_ = clip_grad_norm_
    accelerator.clip_grad_value_ = clip_grad_value_


class _ReportingOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Says of a step that the optimizer skipped that it was, so that the learning rate's schedule waits."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was not applied; not of one that other workers have taken, and move their rates."""
        optimizer = synchronized(self)
        return not optimizer.last_step.applied and not optimizer.steps_alone
