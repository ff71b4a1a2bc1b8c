"""The optimizer and the schedule that a user asked for: an object, a function that builds one, or a section."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import ParamsT

from thinwire.engine.config import EngineConfig
from thinwire.engine.config.models import OptimizerConfig
from thinwire.engine.config.rules import total_steps
from thinwire.engine.config.sections import is_local_updates, refusal_of, uncompressed_class
from thinwire.engine.schedules import build_schedule
from thinwire.optim import muon, registry
from thinwire.optim.exact import UNCORRECTED
from thinwire.optim.optimizer import CompressedOptimizer
from thinwire.optim.registry import OptimizerEntry
from thinwire.zero.shard_optimizer import OptimizerClass

GivenOptimizer = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]
GivenSchedule = LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler]


@dataclass(frozen=True)
class LocalUpdates:
    """DiLoCo around the class `inner`, which takes `inner_options`."""

    inner: OptimizerClass
    inner_options: dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """What to shard: parameters or groups of them, and what steps them, a class of torch's, one of our own or local
    updates, with its options. `passed_over`: how many of `model_parameters` an optimizer that was passed beside them
    does not train."""

    parameters: ParamsT
    optimizer: OptimizerClass | OptimizerEntry | LocalUpdates
    options: dict[str, Any]
    passed_over: int = 0

    @property
    def elastic(self) -> bool:
        """Whether workers come and go."""
        return self.options.get("elastic") is not None

    def over(self, moved: Mapping[int, Tensor]) -> Recipe:
        """The same of the parameters in `moved`, by the ids of those in whose place they are; of others nothing is
        here. Groups stay the same dicts."""
        groups = groups_of(self.parameters)
        for group in groups:
            group["params"] = [moved[id(one)] for one in group["params"] if id(one) in moved]
        return replace(self, parameters=groups)

    def trains(self) -> set[int]:
        """The ids of the parameters that the optimizer will hold."""
        return _trainable(self.parameters)


def find_recipe(
    given: GivenOptimizer | None, model: nn.Module, model_parameters: ParamsT | None, config: EngineConfig
) -> Recipe | None:
    """What the user asked for, by `given` or else by the configuration's optimizer section; None where that has none.

    An optimizer's groups are taken over as the same dicts, so that a schedule built on it goes on steering them.

    An optimizer that is given says what is trained: it may lack some of `model_parameters`, and hold no others that
    require a gradient.

    Raises ValueError where an optimizer has stepped already, cannot be sharded, or holds others;
    TypeError where `given` is, or returns, no optimizer.
    """
    section = config.optimizer
    parameters: list[Any] = list(model_parameters if model_parameters is not None else model.parameters())
    if given is None:
        if section is None:
            return None
        if section.type in registry.NAMES:
            if section.type == "OneBitMuon":
                muon.mark_matrices(model.named_parameters(), model)
            return Recipe(parameters, registry.entry(section.type), dict(section.params))
        if not is_local_updates(section.type):
            return Recipe(parameters, *_uncompressed(section, model))
        own = dict(section.params)
        local = LocalUpdates(*_uncompressed(OptimizerConfig(**own.pop("inner")), model))
        return Recipe(parameters, local, own)
    optimizer = given if isinstance(given, torch.optim.Optimizer) else _called(given, parameters)
    _check_can_be_taken_over(optimizer)
    missing = 0 if model_parameters is None else _count_missing(parameters, optimizer.param_groups)
    taken = inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in taken}
    return Recipe(optimizer.param_groups, type(optimizer), options, missing)


def _uncompressed(section: OptimizerConfig, model: nn.Module) -> tuple[OptimizerClass, dict[str, Any]]:
    """The class that a section names, one that sends gradients exactly, and its options."""
    options = {name: value for name, value in section.params.items() if (name, value) != ("elastic", None)}
    if section.type == "Muon":
        muon.mark_matrices(model.named_parameters(), model)
    if section.type in UNCORRECTED and not options.pop("bias_correction", True):
        return UNCORRECTED[section.type], options
    return uncompressed_class(section.type), options


def _called(build: GivenOptimizer, parameters: list[Any]) -> torch.optim.Optimizer:
    if not callable(build):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, or a function from parameters to one, got {build!r}"
        )
    optimizer = build(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        name = getattr(build, "__name__", type(build).__name__)
        raise TypeError(f"{name} returned {optimizer!r} instead of a torch.optim.Optimizer")
    return optimizer


def _check_can_be_taken_over(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if hasattr(optimizer, "comm"):
        raise ValueError(
            f"{name} synchronises ranks by itself: with the engine, name it in the configuration's "
            '"optimizer" section, or pass a torch optimizer'
        )
    if type(optimizer).__module__.startswith("torch.optim"):
        if name in registry.EXACT:
            raise ValueError(
                f"torch.optim.{name} takes nothing but matrices, and cannot be sharded: pass thinwire.optim.{name}, "
                'which has AdamW for the rest, or name it in the configuration\'s "optimizer" section'
            )
        if (refusal := refusal_of(name)) is not None:
            raise ValueError(f"this optimizer cannot be sharded: {refusal}")
    # Adagrad has state from the start, with a step count of zero.
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ValueError(
            f"this {name} has stepped already, and its state would be lost: pass a new one, and load the state from a "
            "checkpoint of the engine"
        )


def groups_of(parameters: ParamsT) -> list[dict[str, Any]]:
    """The parameters as groups, each once in its own; those that are some already stay the same dicts."""
    given = muon.groups_of(parameters)
    for group in given:
        every = (one[1] if isinstance(one, tuple) else one for one in group["params"])
        group["params"] = list(dict.fromkeys(every))
        for one in group["params"]:
            if not isinstance(one, Tensor):
                raise TypeError(f'model_parameters are tensors, or groups with "params" of them, not {one!r}')
    return given


def _count_missing(given: ParamsT, held: ParamsT) -> int:
    """How many of `given` the optimizer lacks, frozen ones left out."""
    mine, theirs = _trainable(given), _trainable(held)
    missing, foreign = len(mine - theirs), len(theirs - mine)
    if foreign:
        raise ValueError(
            f"model_parameters are not those of the optimizer that is passed beside them: it lacks {missing} of the "
            f"{len(mine)} that require a gradient, and has {foreign} others. Leave model_parameters out, or freeze "
            "with requires_grad_(False) what is not to be trained"
        )
    return missing


def _trainable(parameters: ParamsT) -> set[int]:
    return {id(one) for group in groups_of(parameters) for one in group["params"] if one.requires_grad}


def check_schedule(given: GivenSchedule | None, optimizer: GivenOptimizer | None) -> None:
    """Raise ValueError or TypeError, before anything is built, for a schedule that could not steer the engine."""
    if isinstance(given, LRScheduler):
        _check_instance(given)
        if given.optimizer is not optimizer:
            raise ValueError(
                f"this {type(given).__name__} was built on another optimizer than the one passed beside it, and could "
                "not steer the engine's: pass that optimizer too, or a function that takes the engine's optimizer and "
                "returns the schedule"
            )
    elif given is not None and not callable(given):
        raise TypeError(
            "lr_scheduler must be a schedule of torch.optim.lr_scheduler, or a function from an optimizer to one, got "
            f"{type(given).__name__}"
        )


def make_schedule(
    given: GivenSchedule | None, optimizer: torch.optim.Optimizer, config: EngineConfig
) -> LRScheduler | None:
    """The schedule of `optimizer`. One built on the user's optimizer is kept: the two optimizers share their groups.

    Raises ValueError or TypeError where the schedule does not fit, or a variance would be frozen before it is warm.
    """
    if getattr(optimizer, "comes_and_goes", False) and (given is not None or config.scheduler is not None):
        for group in optimizer.param_groups:  # a worker that joins has the rates of the others' schedules
            group["lr"] = group.get("initial_lr", group["lr"])
    schedule = _find_schedule(given, optimizer, config)
    if isinstance(optimizer, CompressedOptimizer):
        optimizer.check_schedule(schedule, total_steps(config))
    return schedule


def move_schedule(schedule: LRScheduler | None, taken: int, until: int, options: Mapping[str, Any]) -> int:
    """Step a schedule that has taken so many steps until it has taken `until`, at least; how many it has now."""
    with warnings.catch_warnings():  # of a schedule that moves before its optimizer, as that of a worker who joins
        warnings.filterwarnings("ignore", "Detected call of", UserWarning)
        for _ in range(taken, until if schedule is not None else taken):
            schedule.step(**options)  # type: ignore[union-attr]
    return max(taken, until)


def _find_schedule(
    given: GivenSchedule | None, optimizer: torch.optim.Optimizer, config: EngineConfig
) -> LRScheduler | None:
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
