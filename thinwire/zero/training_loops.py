"""Training loops of others: the Trainer that would clip what each rank has by itself, whoever else knows that a
backward only adds up, and DistributedDataParallel, which must not send gradients that are sent here.

No `from __future__ import annotations`: DDP inspects a hook's annotations, which must be the types themselves.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "check_nobody_clips",
    "check_nobody_counts",
    "find_accumulation",
    "find_ddp",
    "leave_gradients_alone",
    "refuse_late_workers",
    "trainer_classes",
    "wrapper_classes",
]


def trainer_classes() -> list[type]:
    """The Trainers that this process has imported."""
    return [kind for kind, _ in _checks()]


def check_nobody_clips(optimizer: torch.optim.Optimizer, trainers: Iterable[Any]) -> None:
    """Raise RuntimeError where one of these steps `optimizer` and clips gradients itself.

    `trainers`: instances of `trainer_classes()`; others are passed over. Clipping would be noticed in `step` too, but
    in the first step that exceeds the norm, hours later perhaps. An optimizer that `keeps_gradients` may be clipped by
    anybody: they are nobody else's.
    """
    if getattr(optimizer, "keeps_gradients", False):
        return
    checks = _checks()
    for trainer in trainers:
        for kind, check in checks:
            if issubclass(type(trainer), kind):
                check(trainer, optimizer)


def check_nobody_counts(optimizer: torch.optim.Optimizer, trainers: Iterable[Any]) -> None:
    """Raise ValueError where one of these steps `optimizer`, and that is of a worker that comes and goes."""
    kinds = tuple(trainer_classes()) if getattr(optimizer, "comes_and_goes", False) else ()
    for trainer in trainers:
        if issubclass(type(trainer), kinds):
            stepped = [
                getattr(trainer, "optimizer", None),
                *getattr(getattr(trainer, "strategy", None), "optimizers", ()),
            ]
            if any(_steps(one, optimizer) for one in stepped):
                refuse_late_workers(type(trainer).__name__)


def refuse_late_workers(trainer: str) -> None:
    """Raise ValueError: `trainer` cannot train a worker that comes and goes."""
    raise ValueError(
        f"{trainer} counts steps and saves by itself, and a worker of an elastic job may join at a step that others "
        "have reached: train DiLoCo with elastic= in a loop of your own, `while optimizer.steps < STEPS`, or without"
    )


def _check_transformers(trainer: Any, optimizer: torch.optim.Optimizer) -> None:
    adapted = getattr(trainer, "clips_averaged_gradients", False)
    if not adapted and _steps(getattr(trainer, "optimizer", None), optimizer) and trainer.args.max_grad_norm > 0:
        name, limit = type(optimizer).__name__, trainer.args.max_grad_norm
        raise RuntimeError(
            f"{type(trainer).__name__} clips gradients to max_grad_norm={limit} (1.0 unless TrainingArguments say "
            f"otherwise) after {name} has sent them, so that each rank would clip its own: train with "
            "thinwire.hugging_face.TrainerMixin, which clips the average, or set max_grad_norm=0 and pass "
            f"max_norm={limit} to {name}"
        )


def _check_lightning(trainer: Any, optimizer: torch.optim.Optimizer) -> None:
    strategy = trainer.strategy
    if getattr(strategy, "clips_averaged_gradients", False) or not trainer.gradient_clip_val:
        return
    if any(one is optimizer for one in strategy.optimizers):
        name, limit = type(optimizer).__name__, trainer.gradient_clip_val
        raise RuntimeError(
            f"{type(trainer).__name__} clips gradients to gradient_clip_val={limit} after {name} has sent them, so "
            f"that each rank would clip its own: pass max_norm={limit} to {name}, which clips the average, and train "
            'with Trainer(strategy="thinwire"), the ThinwireStrategy of thinwire.lightning'
        )


def _steps(stepped: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is `optimizer`, or holds it, as Accelerate's wrappers do."""
    while stepped is not optimizer and hasattr(stepped, "optimizer"):
        stepped = stepped.optimizer
    return stepped is optimizer


def _checks() -> list[tuple[type, Callable[[Any, torch.optim.Optimizer], None]]]:
    found = ((getattr(sys.modules.get(module), "Trainer", None), check) for module, check in _CHECKS.items())
    return [(kind, check) for kind, check in found if kind is not None]


_CHECKS = {
    "transformers.trainer": _check_transformers,
    "lightning.pytorch.trainer.trainer": _check_lightning,
    "pytorch_lightning.trainer.trainer": _check_lightning,
}


# Accumulation: Accelerate's `accumulate()` holds back nothing but DistributedDataParallel


def wrapper_classes() -> list[type]:
    """What wraps optimizers and knows, where this process has imported it."""
    wrapper = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    return [] if wrapper is None else [wrapper]


def find_accumulation(optimizer: torch.optim.Optimizer, wrappers: Iterable[Any]) -> Callable[[], bool] | None:
    """What says whether the running backward is the last one before a step of `optimizer`; None where nobody knows.

    `wrappers`: instances of `wrapper_classes()`; others are passed over.
    """
    kinds = tuple(wrapper_classes())
    for one in wrappers:
        inner = one
        while issubclass(type(inner), kinds):
            inner = getattr(inner, "optimizer", None)
        if inner is not one and inner is optimizer:
            state = one.gradient_state
            return lambda: bool(state.sync_gradients)
    return None


def find_ddp(models: Iterable[Any], parameters: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """Those of `models` that are a DistributedDataParallel and average the gradients of some of these parameters.

    DDP leaves no trace on parameters: `models` are all that `instances_of` finds.
    """
    wanted = {id(parameter) for parameter in parameters}
    return [
        one
        for one in models
        if issubclass(type(one), DistributedDataParallel)
        and any(id(parameter) in wanted for parameter in one.module.parameters())
    ]


def leave_gradients_alone(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP communication hook that sends nothing: somebody else synchronises."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
