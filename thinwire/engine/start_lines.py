"""What rank 0 says of a job's configuration once, when its engine is built, unless `thinwire.comm.init(quiet=True)`."""

from __future__ import annotations

import sys

import torch
from torch.optim.lr_scheduler import LRScheduler

from thinwire.comm import Communicator
from thinwire.engine.config import EngineConfig
from thinwire.engine.recipe import GivenOptimizer, GivenSchedule

__all__ = ["say_at_start"]


def say_at_start(
    comm: Communicator,
    settings: EngineConfig,
    optimizer: GivenOptimizer | None,
    schedule: GivenSchedule | None,
    passed_over: int,
) -> None:
    """Say which keys have no effect, which sections give way to an optimizer or schedule passed beside them, and how
    many of `model_parameters` that optimizer passes over."""
    if not comm.speaks:
        return
    lines = [settings.remarks.line()]
    if optimizer is not None and settings.optimizer is not None:
        lines.append(_gives_way("optimizer", settings.optimizer.type, _name(optimizer, torch.optim.Optimizer)))
    if schedule is not None and settings.scheduler is not None:
        lines.append(_gives_way("scheduler", settings.scheduler.type, _name(schedule, LRScheduler)))
    if passed_over:
        lines.append(f"{passed_over} of model_parameters are not trained: the optimizer passed beside them lacks them")
    for line in filter(None, lines):
        print(f"thinwire: {line}", file=sys.stderr, flush=True)


def _gives_way(section: str, named: str, given: str) -> str:
    return f'{given}, passed to initialize, is used in place of "{named}" in the configuration\'s "{section}" section'


def _name(given: object, kind: type) -> str:
    if isinstance(given, kind):
        return f"the {type(given).__name__}"
    return f"the function {getattr(given, '__name__', type(given).__name__)}"
