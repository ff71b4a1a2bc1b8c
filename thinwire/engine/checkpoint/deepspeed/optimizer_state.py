"""What an optimizer held, whichever files it was in: slices of parameters, and the settings of its groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.checkpoint.deepspeed.fields import number_of
from thinwire.engine.checkpoint.errors import CheckpointError
from thinwire.zero import SavedSlice

__all__ = ["OptimizerState", "moments_of", "scalars_of", "weight_kind"]

_SCALAR = "scalar."
_STEP = "step"


@dataclass(frozen=True)
class OptimizerState:
    """`slices`: weights that lie with the optimizer, and its moments and step counts. `groups`: settings of each group,
    as DeepSpeed's files have them. `loss_scale`: where fp16's scale is described, or None. `notes`: what a user must
    know of it."""

    slices: list[SavedSlice] = field(default_factory=list)
    groups: list[Mapping[str, Any]] = field(default_factory=list)
    loss_scale: Any = None
    notes: list[str] = field(default_factory=list)


def weight_kind(dtype: torch.dtype) -> str:
    """As what fp32 values of a parameter of this dtype are saved: an fp32 parameter is its own master weight."""
    return "weight" if dtype == torch.float32 else "master"


def moments_of(state: Mapping[str, Any], of_a_scalar: bool = False) -> dict[str, Tensor]:
    """The part of a state that has a value for each element; `of_a_scalar`: of a parameter without dimensions."""
    return {
        kind: one
        for kind, one in state.items()
        if isinstance(one, Tensor) and (one.dim() > 0 or of_a_scalar) and kind != _STEP and one.is_floating_point()
    }


def scalars_of(
    state: Mapping[str, Any], settings: Mapping[str, Any], name: str, where: str, of_a_scalar: bool = False
) -> Iterator[SavedSlice]:
    """The part of a state that has one value for a parameter; a step count may be one of its group's settings."""
    values = {kind: one for kind, one in state.items() if kind not in moments_of(state, of_a_scalar)}
    if _STEP in settings:
        values.setdefault(_STEP, settings[_STEP])
    for kind, value in values.items():
        if value is None:
            continue
        number = number_of(value, f"{kind} of {where}")
        if not -(2.0**63) < number < 2.0**63:
            raise CheckpointError(f"{kind} of {where} is {number}, which is no count")
        yield SavedSlice(_SCALAR + kind, name, 0, torch.tensor([number], dtype=torch.float32))
