"""The optimizers that experiments train with, by name: the one place that knows their classes, options and colours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

import thinwire
from experiments.training.baseline import Averaged, AveragedAdamW, AveragedLamb, AveragedLion, AveragedMuon
from experiments.training.plain_diloco import PlainDiLoCo
from experiments.training.plans import Plan
from thinwire.comm import Communicator
from thinwire.optim import registry

__all__ = [
    "COMPRESSED",
    "ENGINE",
    "EXACT",
    "FREEZE_OPTIONS",
    "OPTIMIZERS",
    "OUTER",
    "PARENTS",
    "SHARDED",
    "Compressed",
    "Exact",
    "Outer",
    "build",
    "engine_section",
]


@dataclass(frozen=True)
class Exact:
    """An exact optimizer, on exactly averaged gradients.

    Attributes:
        class_name: its name in the engine's configurations, where torch has it.
        label: for pictures and tables.
        colour: for pictures.
        averaged: its class, which averages by itself.
    """

    class_name: str
    label: str
    colour: str
    averaged: type[Averaged]


@dataclass(frozen=True)
class Compressed:
    """One of thinwire's optimizers.

    Attributes:
        class_name: of its class in thinwire, and its name in the engine's configurations.
        label: for pictures and tables.
        colour: for pictures.
        parent: name of the exact optimizer that it is compared with.
        stages: of ZeRO that shard its state.
        freeze_option: what it calls the step at which it freezes its variance; None where it freezes nothing.
        local_steps: between two synchronisations each rank has weights of its own.
    """

    class_name: str
    label: str
    colour: str
    parent: str
    stages: tuple[int, ...]
    freeze_option: str | None
    local_steps: bool


@dataclass(frozen=True)
class Outer:
    """An exact optimizer's own steps on every worker, and now and then an outer step on what all of them did.

    Attributes:
        class_name: of its class.
        label: for pictures and tables.
        colour: for pictures.
        parent: name of the exact optimizer that takes the workers' own steps.
        make: takes groups, with names, the communicator as `comm`, and options.
    """

    class_name: str
    label: str
    colour: str
    parent: str
    make: Callable[..., Any]


EXACT = {
    "adamw": Exact("AdamW", "AdamW", "#5b6572", AveragedAdamW),
    "lamb": Exact("Lamb", "LAMB", "#5b6572", AveragedLamb),
    "lion": Exact("Lion", "Lion", "#2b6ca3", AveragedLion),
    "muon": Exact("Muon", "Muon", "#6a4c93", AveragedMuon),
}

_NAMES = {exact.class_name: name for name, exact in EXACT.items()}


def _compressed(class_name: str, label: str, colour: str) -> Compressed:
    known = registry.entry(class_name)
    return Compressed(
        class_name, label, colour, _NAMES[known.parent], known.stages, known.freeze_option, known.local_steps
    )


COMPRESSED = {
    "onebit-adam": _compressed("OneBitAdam", "1-bit Adam", "#d1495b"),
    "zero-one-adam": _compressed("ZeroOneAdam", "0/1 Adam", "#edae49"),
    "onebit-lamb": _compressed("OneBitLamb", "1-bit LAMB", "#00798c"),
    "onebit-lion": _compressed("OneBitLion", "1-bit Lion", "#d1495b"),
    "onebit-muon": _compressed("OneBitMuon", "1-bit Muon", "#6a4c93"),
}
"""Names on command lines and in results, and thinwire's optimizers."""


def _diloco(groups: list[dict[str, Any]], inner: str = "AdamW", **options: Any) -> Any:
    if inner == "QHAdamW":
        return thinwire.DiLoCo(groups, thinwire.optim.QHAdamW, **{**options, "betas": (0.98, 0.999)})
    return thinwire.DiLoCo(groups, torch.optim.AdamW, **options)


def _diloco_muon(groups: list[dict[str, Any]], **options: Any) -> Any:
    return thinwire.DiLoCo(groups, thinwire.optim.Muon, adjust_lr_fn="match_rms_adamw", **options)


OUTER = {
    "diloco": Outer("DiLoCo", "DiLoCo", "#2b6ca3", "adamw", _diloco),
    "diloco-muon": Outer("DiLoCo", "DiLoCo, Muon", "#00798c", "muon", _diloco_muon),
    "plain-diloco": Outer("PlainDiLoCo", "DiLoCo in 20 lines of torch", "#8f6bb3", "adamw", PlainDiLoCo),
}
"""What sends no gradient at all; `every` and, of thinwire's, `codec`, `fragments`, `overlap` and the like are options
of `build`."""

OPTIMIZERS: dict[str, Exact | Compressed | Outer] = {**EXACT, **COMPRESSED, **OUTER}
"""All of them."""

ENGINE = (*(name for name, one in EXACT.items() if hasattr(torch.optim, one.class_name)), *COMPRESSED)
"""Those that the engine knows: torch's own, and thinwire's."""

PARENTS = {name: one.parent for name, one in COMPRESSED.items()}
"""What sends a bit an element or less, and the exact optimizer each is compared with."""

SHARDED: dict[str, Callable[..., torch.optim.Optimizer]] = {"sharded-adamw": torch.optim.AdamW}
"""Torch optimizers that ShardedOptimizer shards; `stage` and `codec` are options of `build`."""

FREEZE_OPTIONS = tuple(dict.fromkeys(one.freeze_option for one in COMPRESSED.values() if one.freeze_option))
"""What they call the step of the freeze."""


_EVERY = 30
"""Steps between outer steps where nothing else is said: thinwire's own default."""


def build(name: str, groups: list[dict[str, Any]], plan: Plan, comm: Communicator, **options: Any) -> Any:
    """An optimizer that synchronises the ranks of `comm` by itself and counts `bytes_sent`. Collective.

    It is made as the plan says; `options` of its class come on top.

    Raises:
        ValueError: there is no optimizer of that name.
    """
    if name in EXACT:
        return EXACT[name].averaged(groups, comm, lr=plan.learning_rate, **options)
    if name in SHARDED:
        return thinwire.ShardedOptimizer(groups, SHARDED[name], comm=comm, lr=plan.learning_rate, **options)
    if name in OUTER:
        return OUTER[name].make(groups, comm=comm, **{"lr": plan.learning_rate, "every": _EVERY} | options)
    if name not in COMPRESSED:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}")
    one = COMPRESSED[name]
    planned = {"lr": plan.learning_rate, **_planned_options(one, plan)}
    return getattr(thinwire, one.class_name)(groups, comm=comm, **planned | options)


def engine_section(
    name: str, learning_rate: float, freeze_step: int | Literal["auto"], **params: Any
) -> dict[str, Any]:
    """The section "optimizer" of the engine's configuration; `params` come on top."""
    one = OPTIMIZERS[name]
    planned: dict[str, Any] = {"lr": learning_rate}
    if isinstance(one, Compressed) and one.freeze_option is not None:
        planned[one.freeze_option] = freeze_step
    return {"type": one.class_name, "params": planned | params}


def _planned_options(one: Compressed, plan: Plan) -> dict[str, Any]:
    if one.local_steps:
        return _intervals(plan)
    return {} if one.freeze_option is None else {one.freeze_option: plan.freeze_step}


def _intervals(plan: Plan) -> dict[str, Any]:
    """0/1 Adam's options for runs of thousands of steps; its defaults are for hundreds of thousands.

    β₂ counts updates of the variance, of which there are fewer than 100 until the freeze: 0.999 would remember all of
    them alike, the large gradients of the beginning too.
    """
    return {
        "var_freeze_step": plan.fixed_freeze_step,
        "var_update_scaler": max(1, plan.fixed_freeze_step // 20),
        "betas": (0.9, 0.99),
        "local_step_scaler": plan.local_step_scaler,
        "local_step_clipper": 4,
    }
