"""The table of thinwire's optimizers: what a configuration, a plan, an experiment or a test must know of one before it
imports the class, which takes torch along."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["NAMES", "Decline", "OptimizerEntry", "Option", "entry"]


@dataclass(frozen=True)
class Option:
    """A keyword argument of an optimizer that a file can hold. `kind`: what it takes there, written as an annotation;
    `default`: the constructor's."""

    kind: str
    default: Any


@dataclass(frozen=True)
class Decline:
    """A key of DeepSpeed's that an optimizer does not take. `instead`: why, or what to do. `matches`: values that ask
    for what happens anyway."""

    instead: str
    matches: tuple[Any, ...] = ()


@dataclass(frozen=True)
class OptimizerEntry:
    """What is known of one optimizer.

    Args:
        name: of its class in `thinwire.optim`.
        parent: the optimizer that it is without compression, by torch's name, or the one it has in the literature.
        refused_stages: the ZeRO stages that it does not work at, and why.
        options: what a configuration may set, besides what the engine sets itself.
        declines: DeepSpeed's keys that it does not take.
        freeze_option: the option that says when the variance is frozen; None where nothing is.
        elementwise: whether every element steps by itself, so that buckets may be cut anywhere.
        local_steps: whether there are steps that send nothing.
        offloads: whether it takes `offload` and `pin_memory`.
    """

    name: str
    parent: str
    refused_stages: Mapping[int, str]
    options: Mapping[str, Option]
    declines: Mapping[str, Decline]
    freeze_option: str | None = None
    elementwise: bool = True
    local_steps: bool = False
    offloads: bool = True

    @property
    def stages(self) -> tuple[int, ...]:
        """The ZeRO stages that it works at."""
        return tuple(stage for stage in range(4) if stage not in self.refused_stages)

    def load(self) -> type[Any]:
        """The class; it takes `stage`."""
        found: type[Any] = getattr(importlib.import_module("thinwire.optim"), self.name)
        return found


_WIRE_OPTIONS = {
    "block_size": Option("int", 2048),
    "comm_backend_name": Option("Literal['nccl', 'gloo', 'mpi']", None),
}
_ADAM_OPTIONS = {
    "lr": Option("float", 1e-3),
    "betas": Option("tuple[float, float]", (0.9, 0.999)),
    "eps": Option("float", 1e-8),
    "weight_decay": Option("float", 0.0),
    "bias_correction": Option("bool", True),
}


def _declines(name: str) -> dict[str, Decline]:
    """What no optimizer takes."""
    return {
        "amsgrad": Decline("a frozen variance has no maximum to keep", (False,)),
        "codec": Decline(
            f"in the engine it is sign1, which every stage has; thinwire.{name} takes others at stage 0", ("sign1",)
        ),
        "compress": Decline(
            f"in the engine it is the update, which every stage has; thinwire.{name} takes the momentum too at stage 0",
            ("update",),
        ),
        "eps_inside_sqrt": Decline(f"use thinwire.{name} without the engine", (False,)),
        "exp_avg_mask": Decline(f"give it in a parameter group of thinwire.{name}"),
    }


_WHOLE_STATE = (
    "stage 3 gathers every layer's parameters, and would have to gather its momentum, in full precision, and each "
    "worker of the 1-bit exchange needs its own whole residual and momentum, which stage 3 would shard"
)
_NO_GRADIENT = (
    "a gradient lives only while its bucket is in flight, at every stage, so that there is none to shard once steps "
    "are compressed"
)
_LOCAL = "in a local step a worker needs its own whole gradient, momentum and weights, which stages 2 and 3 would shard"

_ENTRIES = (
    OptimizerEntry(
        "OneBitAdam",
        "AdamW",
        refused_stages={3: _WHOLE_STATE},
        options={**_ADAM_OPTIONS, **_WIRE_OPTIONS, "freeze_step": Option("int | Literal['auto']", "auto")},
        declines=_declines("OneBitAdam"),
        freeze_option="freeze_step",
    ),
    OptimizerEntry(
        "OneBitLamb",
        "Lamb",
        refused_stages={2: _NO_GRADIENT, 3: _WHOLE_STATE},
        options={
            **_ADAM_OPTIONS,
            **_WIRE_OPTIONS,
            "freeze_step": Option("int | Literal['auto']", 100_000),
            "max_coeff": Option("float", 10.0),
            "min_coeff": Option("float", 0.01),
            "coeff_beta": Option("float", 0.9),
            "factor_max": Option("float", 4.0),
            "factor_min": Option("float", 0.5),
            "factor_threshold": Option("float", 0.1),
        },
        declines={**_declines("OneBitLamb"), "eps_inside_sqrt": Decline("LAMB adds eps to the root", (False,))},
        freeze_option="freeze_step",
        elementwise=False,
    ),
    OptimizerEntry(
        "ZeroOneAdam",
        "AdamW",
        refused_stages={2: _LOCAL, 3: _LOCAL},
        options={
            **_ADAM_OPTIONS,
            **_WIRE_OPTIONS,
            "var_freeze_step": Option("int", 100_000),
            "var_update_scaler": Option("int", 16),
            "local_step_scaler": Option("int", 32_678),
            "local_step_clipper": Option("int", 16),
        },
        declines={
            **_declines("ZeroOneAdam"),
            "freeze_step": Decline('give "var_freeze_step"'),
        },
        freeze_option="var_freeze_step",
        local_steps=True,
        offloads=False,
    ),
    OptimizerEntry(
        "OneBitLion",
        "Lion",
        refused_stages={2: _NO_GRADIENT, 3: _WHOLE_STATE},
        options={
            "lr": Option("float", 1e-4),
            "betas": Option("tuple[float, float]", (0.9, 0.99)),
            "weight_decay": Option("float", 0.0),
            **_WIRE_OPTIONS,
        },
        declines=_declines("OneBitLion"),
        offloads=False,
    ),
)

_BY_NAME = {one.name: one for one in _ENTRIES}

NAMES: tuple[str, ...] = tuple(_BY_NAME)
"""Of every optimizer, in the order in which they are shown."""


def entry(name: str) -> OptimizerEntry:
    """The entry of that name. Raises KeyError, which lists the names, for another."""
    if name not in _BY_NAME:
        raise KeyError(f"{name!r} is not one of {', '.join(NAMES)}")
    return _BY_NAME[name]
