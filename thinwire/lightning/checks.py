"""What a Lightning Trainer's optimizers and settings must be: refused before anything is trained, rather than
ignored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from thinwire.zero.clipping_trainers import refuse_late_workers
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

__all__ = ["check_clipping", "check_optimizers", "check_places"]


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer], world_size: int, scaler: object) -> None:
    """Raise TypeError for an optimizer that is not ours, ValueError for one that does not go with the Trainer.

    `scaler`: the GradScaler that steps it, if any.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if not isinstance(optimizer, SynchronizedOptimizer):
            raise TypeError(
                f"configure_optimizers() returned {name}, and under ThinwireStrategy only a thinwire optimizer sends "
                "gradients, so that ranks would train apart: return thinwire.OneBitAdam(self.parameters(), ...) or "
                'another of thinwire\'s, or train with strategy="ddp"'
            )
        if optimizer.comes_and_goes:
            refuse_late_workers("the Trainer")
        if optimizer.comm.size != world_size:
            raise ValueError(
                f"{name} has {optimizer.comm.size} ranks and the Trainer {world_size}: build the optimizer, and its "
                "communicator, in configure_optimizers(), when the Trainer's processes have met, and start the job "
                "with as many processes as devices= and num_nodes= say"
            )
        if scaler is not None and getattr(optimizer, "stage", 0) == 2:
            raise ValueError(
                'precision="16-mixed" steps through a GradScaler, which cannot look at gradients that stage 2 has sent '
                'to their owners: use stage=1, or precision="bf16-mixed"'
            )


def check_clipping(optimizer: Any, value: float | None, algorithm: str | None) -> None:
    """Raise ValueError where Lightning is to clip otherwise than this optimizer does.

    `value` and `algorithm`: the Trainer's gradient_clip_val and gradient_clip_algorithm, or what `clip_gradients` of a
    LightningModule was given.
    """
    if not value:
        return
    name = type(optimizer).__name__.removeprefix("Lightning")
    if algorithm is not None and str(getattr(algorithm, "value", algorithm)) != "norm":
        raise ValueError(
            f'gradient_clip_algorithm="value" clips every element of a gradient, which has left for the other ranks by '
            f'then: clip by norm, with gradient_clip_algorithm="norm" and max_norm={value} of {name}'
        )
    if value != optimizer.max_norm:
        raise ValueError(
            f"gradient_clip_val is {value} and max_norm of {name} is {optimizer.max_norm}: pass max_norm={value} to "
            f"{name}, as the optimizer clips for the Trainer, by the averaged gradient's norm"
        )


def check_places(callbacks: Sequence[Any]) -> None:
    """Raise ValueError for a ModelCheckpoint, of these, that saves where not all ranks can write files."""
    for callback in callbacks:
        if "://" in (folder := str(getattr(callback, "dirpath", None) or "")):
            raise ValueError(
                f"{type(callback).__name__} saves to {folder}, and every rank writes a file of its optimizer's state: "
                "give a dirpath on a file system that all ranks have mounted"
            )
