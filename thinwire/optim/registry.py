"""The table of thinwire's optimizers: what a configuration, a plan, an experiment or a test must know of one before it
imports the class, which takes torch along."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.optim.settings import OptionModel


@dataclass(frozen=True)
class OptimizerEntry:
    """What is known of one optimizer.

    Args:
        name: of its class in `thinwire.optim`.
        parent: the optimizer that it is without compression, by torch's name, or the one it has in the literature.
        refused_stages: the ZeRO stages that it does not work at, and why.
        freeze_option: the option that says when the variance is frozen; None where nothing is.
        elementwise: whether every element steps by itself, so that buckets may be cut anywhere.
        local_steps: whether there are steps that send nothing.
        offloads: whether it takes `offload` and `pin_memory`.
    """

    name: str
    parent: str
    refused_stages: Mapping[int, str]
    freeze_option: str | None = None
    elementwise: bool = True
    local_steps: bool = False
    offloads: bool = True

    @property
    def stages(self) -> tuple[int, ...]:
        """The ZeRO stages that it works at."""
        return tuple(stage for stage in range(4) if stage not in self.refused_stages)

    @property
    def options(self) -> type[OptionModel]:
        """What a configuration may set, besides what the engine sets itself."""
        found: type[OptionModel] = importlib.import_module("thinwire.optim.settings").OPTIONS[self.name]
        return found

    def load(self) -> type[Any]:
        """The class; it takes `stage`."""
        found: type[Any] = getattr(importlib.import_module("thinwire.optim"), self.name)
        return found


_WHOLE_STATE = (
    "stage 3 gathers every layer's parameters, and would have to gather its momentum, in full precision, and each "
    "worker of the 1-bit exchange needs its own whole residual and momentum, which stage 3 would shard"
)
_WHOLE_MATRICES = "its owners step whole matrices, and stage 3 keeps them in pieces"
_NO_GRADIENT = (
    "a gradient lives only while its bucket is in flight, at every stage, so that there is none to shard once steps "
    "are compressed"
)
_LOCAL = "in a local step a worker needs its own whole gradient, momentum and weights, which stages 2 and 3 would shard"

_ENTRIES = (
    OptimizerEntry("OneBitAdam", "AdamW", {3: _WHOLE_STATE}, freeze_option="freeze_step"),
    OptimizerEntry(
        "OneBitLamb", "Lamb", {2: _NO_GRADIENT, 3: _WHOLE_STATE}, freeze_option="freeze_step", elementwise=False
    ),
    OptimizerEntry("ZeroOneAdam", "AdamW", {2: _LOCAL, 3: _LOCAL}, "var_freeze_step", local_steps=True, offloads=False),
    OptimizerEntry("OneBitLion", "Lion", {2: _NO_GRADIENT, 3: _WHOLE_STATE}, offloads=False),
    OptimizerEntry("OneBitMuon", "Muon", {3: _WHOLE_MATRICES}, elementwise=False),
)

EXACT = ("Lamb", "Lion", "Muon", "QHAdamW")
"""Names in `thinwire.optim` of what sends gradients exactly, and torch lacks or has for matrices alone."""


def exact(name: str) -> type[Any]:
    """The class of one of `EXACT`."""
    found: type[Any] = getattr(importlib.import_module("thinwire.optim"), name)
    return found


def needs_whole_parameters(name: str) -> bool:
    """Whether the optimizer of this name, ours or torch's, cannot step a part of a parameter by itself."""
    return name in EXACT and hasattr(exact(name), "whole_parameters")


_BY_NAME = {one.name: one for one in _ENTRIES}

NAMES: tuple[str, ...] = tuple(_BY_NAME)
"""Of every optimizer, in the order in which they are shown."""


def entry(name: str) -> OptimizerEntry:
    """The entry of that name. Raises KeyError, which lists the names, for another."""
    if name not in _BY_NAME:
        raise KeyError(f"{name!r} is not one of {', '.join(NAMES)}")
    return _BY_NAME[name]
