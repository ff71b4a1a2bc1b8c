"""Training loops of others: who wraps the model in DistributedDataParallel, which must not send gradients that are sent
here, who knows that a backward only adds up, and who counts the steps of a worker that may join late; and which thread
may call, and when, after one was cut short.

No `from __future__ import annotations`: DDP inspects a hook's annotations, which must be the types themselves.
"""

import sys
import threading
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

from thinwire.zero.replica import local_part

_TRAINERS = ("transformers.trainer", "lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")


class Turn:
    """The one thread that is in a backward or a call of an optimizer, and whether the last was cut short.

    `thread`: 0 if none is. `call`: what it is in. `backward`: a reference to what torch calls at the end of a backward,
    dead once that has ended, in whatever way. `moving`: weights are. `cut_short`: what was, by an error that no check
    raised, as Ctrl+C or a signal's handler does. `spoiled`: weights were moving then. `alone`: no other rank takes
    part, so that a step may be dropped here alone.
    """

    thread = 0
    call = cut_short = ""
    backward: Callable[[], object] = staticmethod(lambda: None)
    moving = spoiled = False
    alone = False

    @property
    def in_backward(self) -> bool:
        """Whether a backward has begun and not ended."""
        return self.call == "backward()" and self.backward() is not None

    def check(self, call: str) -> None:
        """Raise RuntimeError if another thread is at work, or `call` cannot go on from what was cut short.

        `zero_grad()` drops a backward that has failed; what only reads may follow it.
        """
        goes_on = call in ("step()", "backward()")
        if self.thread not in (0, threading.get_ident()) and (self.call != "backward()" or self.in_backward):
            names = {one.ident: one.name for one in threading.enumerate()}
            if call == "backward()":  # it has added to gradients of the other
                self.cut_short = f"{self.call} beside a backward() in another thread"
            raise RuntimeError(
                f"{call} in thread {threading.current_thread().name!r} while thread {names.get(self.thread)!r} is in "
                f"{self.call} of the same optimizer: call backward(), step() and zero_grad() in one thread, or one "
                "after the other"
            )
        if self.spoiled:
            raise RuntimeError(
                f"{self.cut_short} was cut short while weights were moving, so that only some have: build model and "
                "optimizer anew and load a checkpoint, on every rank"
            )
        if self.cut_short and not self.alone and call != "state_dict()":
            raise RuntimeError(
                f"{self.cut_short} was cut short on this rank, which has lost step with the others: end the job on "
                "every rank, and resume it from a checkpoint"
            )
        if goes_on and (self.cut_short or (self.thread and self.call == "backward()" and not self.in_backward)):
            what = self.cut_short or "the last backward()"
            raise RuntimeError(f"{what} did not come to its end: drop what it has left with zero_grad() first")

    def fail(self, error: BaseException) -> None:
        """End a call, or a backward, by an error."""
        if self.call != "backward()":  # whose end `backward` tells
            self.thread = 0
        if self.moving or not isinstance(error, (ValueError, TypeError, RuntimeError)):
            self.cut_short = self.cut_short or self.call
            self.spoiled |= self.moving
        self.moving = False


def refuse_late_workers(trainer: str) -> None:
    """Raise ValueError: `trainer` cannot train a worker that comes and goes."""
    raise ValueError(
        f"{trainer} counts steps and saves by itself, and a worker of an elastic job may join at a step that others "
        "have reached: train with elastic= in a loop of your own, `while optimizer.steps < STEPS`, or without; "
        "thinwire.hugging_face.Trainer follows it with thinwire_config, and Lightning's with strategy='thinwire'"
    )


def follow_job(trainer: Any, steps: int) -> None:
    """Have Lightning's Trainer and its schedules be where so many steps lead that a job has taken."""
    trainer.follows_workers = True  # see refuse_trainers
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    progress.ready, progress.completed = progress.ready - progress.completed + steps, steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a schedule that is stepped before the optimizer
        for one in trainer.strategy.lr_scheduler_configs:
            while one.scheduler.last_epoch < steps:
                one.scheduler.step()


def refuse_trainers() -> None:
    """Raise ValueError if a Trainer of transformers or Lightning is among the callers: see `refuse_late_workers`."""
    kinds = tuple(kind for name in _TRAINERS if (kind := getattr(sys.modules.get(name), "Trainer", None)) is not None)
    frame = sys._getframe(1) if kinds else None
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, kinds) and not getattr(caller, "follows_workers", False):
            refuse_late_workers(type(caller).__name__)
        frame = frame.f_back


def refuse_unscaling() -> None:
    """Raise RuntimeError: a GradScaler has unscaled gradients that have left."""
    raise RuntimeError(
        "GradScaler.unscale_() was called on this optimizer, but its gradients left, scaled, during backward(): delete "
        "the call; step() unscales, and max_norm= clips. Under transformers' Trainer use "
        "thinwire.hugging_face.TrainerMixin"
    )


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
    if foreign := sum(id(local_part(parameter)) not in ours for parameter in trainable):
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


def warn_of_skipped(optimizer: Any, *, alone: bool) -> None:
    """Warn of the step that an optimizer has skipped: on rank 0, or where this rank `alone` has."""
    # With a loss scale overflows are how it is found: nothing to warn of.
    if optimizer.loss_scale == 1.0 and (alone or optimizer.comm.rank == 0):
        by_this = f"step {optimizer.steps} was skipped by rank {optimizer.comm.global_ranks[optimizer.comm.rank]} alone"
        which = by_this if alone else f"step {optimizer.steps + 1} was skipped on every rank"
        text = f"{which}: {optimizer.last_step.reason}. Weights and momentum are as before the step"
        warnings.warn(text, RuntimeWarning, stacklevel=5)


def leave_gradients_alone(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP communication hook that sends nothing: the optimizer synchronises."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
