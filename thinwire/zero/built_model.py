"""A model that zero.Init has built shard by shard, on its way into an engine: at stage 3 one parameter at a time, so
that no rank ever holds the whole model; at other stages whole, as these need it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.zero.parameter_shard import ZeroParamStatus, shard_of, shards_in

__all__ = ["gather_model", "hide_shapes", "show_shapes", "stand_ins", "values_of"]


@torch.no_grad()
def gather_model(model: Any) -> None:
    """Make every placeholder an ordinary parameter that is whole on every rank. Collective."""
    for parameter, shard in list(shards_in(model)):
        if parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE:  # type: ignore[attr-defined]
            shard.gather(parameter)
        shard.forget(parameter)


@torch.no_grad()
def show_shapes(model: nn.Module) -> None:
    """Have placeholders show the shapes of what they stand for, in the memory of one element each."""
    for parameter, shard in shards_in(model):
        shard.show_shape(parameter)


@torch.no_grad()
def hide_shapes(model: nn.Module) -> None:
    """Undo `show_shapes`."""
    for parameter, shard in shards_in(model):
        if parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE:  # type: ignore[attr-defined]
            shard.release(parameter)


def stand_ins(model: nn.Module) -> dict[str, nn.Parameter]:
    """Put parameters without memory in the place of placeholders; returns these by the parameters' names.

    The new ones are fp32 where they train, as those of any model at stage 3, and tied where the old ones were.
    """
    found = {name: one for name, one in model.named_parameters() if shard_of(one) is not None}
    new: dict[int, nn.Parameter] = {}
    for one in found.values():
        shard = shard_of(one)
        assert shard is not None
        dtype = torch.float32 if one.requires_grad else one.dtype
        values = torch.empty(shard.shape, dtype=dtype, device="meta")
        new[id(one)] = nn.Parameter(values, requires_grad=one.requires_grad)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in new:
                module._parameters[name] = new[id(parameter)]
    return found


@torch.no_grad()
def values_of(placeholders: Mapping[str, nn.Parameter], name: str, wanted: Tensor) -> Tensor:
    """What a parameter of this name is to hold, in the dtype of `wanted`; its placeholder lets go. Collective."""
    placeholder = placeholders[name]
    shard = shard_of(placeholder)
    assert shard is not None
    values = shard.whole(placeholder, wanted.dtype)
    shard.forget(placeholder)
    placeholder.data = values.new_empty(0)
    return values
