"""Training loops of others: who wraps the model in DistributedDataParallel, which must not send gradients that are sent
here, who knows that a backward only adds up, and who counts the steps of a worker that may join late.

No `from __future__ import annotations`: DDP inspects a hook's annotations, which must be the types themselves.
"""

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

_TRAINERS = ("transformers.trainer", "lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")


def refuse_late_workers(trainer: str) -> None:
    """Raise ValueError: `trainer` cannot train a worker that comes and goes."""
    raise ValueError(
        f"{trainer} counts steps and saves by itself, and a worker of an elastic job may join at a step that others "
        "have reached: train DiLoCo with elastic= in a loop of your own, `while optimizer.steps < STEPS`, or without"
    )


def refuse_trainers() -> None:
    """Raise ValueError if a Trainer of transformers or Lightning is among the callers: see `refuse_late_workers`."""
    kinds = tuple(kind for name in _TRAINERS if (kind := getattr(sys.modules.get(name), "Trainer", None)) is not None)
    frame = sys._getframe(1) if kinds else None
    while frame is not None:
        caller = type(frame.f_locals.get("self"))
        if issubclass(caller, kinds):
            refuse_late_workers(caller.__name__)
        frame = frame.f_back


def find_accumulation() -> Callable[[], bool] | None:
    """What says whether the running backward is the last one before a step; None if no library does.

    Hugging Face's Accelerate does, for the whole process; its `accumulate()` holds back nothing but
    DistributedDataParallel by itself.
    """
    kind = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    if kind is None or not kind._shared_state:
        return None
    state: Any = kind()
    return lambda: bool(state.sync_gradients)


def on_first_ddp_forward(
    parameters: Iterable[Tensor], call: Callable[[DistributedDataParallel], None]
) -> RemovableHandle:
    """Call a method with every DistributedDataParallel that averages the gradients of some of these parameters, before
    its next forward, while the method's object lives. What is returned ends that.

    DDP leaves no trace on parameters, by which it could be found in a backward.
    """
    wanted, method = {id(parameter) for parameter in parameters}, weakref.WeakMethod(call)
    seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def look(module: nn.Module, _: Any) -> None:
        if isinstance(module, DistributedDataParallel) and module not in seen and (found := method()) is not None:
            seen.add(module)
            if any(id(parameter) in wanted for parameter in module.module.parameters()):
                found(module)

    return register_module_forward_pre_hook(look)


def check_holds_all(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise ValueError where the model has trainable parameters that the optimizer does not hold."""
    ours = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if foreign := sum(id(parameter) not in ours for parameter in trainable):
        raise ValueError(
            f"{foreign} of the model's {len(trainable)} trainable parameters are not in this optimizer, so no rank "
            f"would synchronise them: pass all of model.parameters() to {type(optimizer).__name__}"
        )


def warn_of_ddp(optimizer: str, sent_twice: int, error: Exception) -> None:
    """Warn that DDP sends so many bytes in vain; `error` says why it cannot be told to stop."""
    warnings.warn(
        f"DistributedDataParallel sends the gradients that {optimizer} sends, {sent_twice / 1e6:.1f} MB a step and "
        f"rank in vain, and cannot be told to stop: {error}. Do not wrap the model, or see attach()",
        RuntimeWarning,
        stacklevel=3,
    )


def leave_gradients_alone(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP communication hook that sends nothing: the optimizer synchronises."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
