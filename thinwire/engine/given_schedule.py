"""Which learning-rate schedule steers the engine's optimizer: the user's own, a function's, or the configuration's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from thinwire.engine.config import EngineConfig
from thinwire.engine.recipe import GivenOptimizer
from thinwire.engine.schedules import build_schedule

__all__ = ["GivenSchedule", "check_schedule", "make_schedule"]

GivenSchedule = LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler]


def check_schedule(given: GivenSchedule | None, optimizer: GivenOptimizer | None) -> None:
    """Raise ValueError or TypeError, before anything is built, for a schedule that could not steer the engine."""
    if given is None:
        return
    if isinstance(given, LRScheduler):
        _check_instance(given)
        if given.optimizer is not optimizer:
            raise ValueError(
                f"this {type(given).__name__} was built on another optimizer than the one passed beside it, and could "
                "not steer the engine's: pass that optimizer too, or a function that takes the engine's optimizer and "
                "returns the schedule"
            )
    elif not callable(given):
        raise TypeError(
            "lr_scheduler must be a schedule of torch.optim.lr_scheduler, or a function from an optimizer to one, got "
            f"{type(given).__name__}"
        )


def make_schedule(
    given: GivenSchedule | None, optimizer: torch.optim.Optimizer, config: EngineConfig
) -> LRScheduler | None:
    """The schedule of `optimizer`. One built on the user's optimizer is kept: the two optimizers share their groups.

    Raises ValueError or TypeError where the schedule does not fit.
    """
    if given is None:
        section = config.scheduler
        return build_schedule(section.type, section.params, optimizer) if section is not None else None
    if isinstance(given, LRScheduler):
        # torch warns at a schedule whose own optimizer never steps; without gradients this moves nothing.
        given.optimizer.zero_grad()
        given.optimizer.step()
        return given
    schedule = given(optimizer)
    if not isinstance(schedule, LRScheduler):
        raise TypeError(f"the lr_scheduler function returned {schedule!r} instead of a schedule of torch")
    _check_instance(schedule)
    if schedule.optimizer is not optimizer:
        raise ValueError("the lr_scheduler function built its schedule on another optimizer than the one it was given")
    return schedule


def _check_instance(schedule: LRScheduler) -> None:
    if isinstance(schedule, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau cannot be stepped by the engine, which has no metric for it: build it on the optimizer "
            "that initialize returns, and step it yourself"
        )
