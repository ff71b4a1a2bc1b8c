"""Optimizers without ZeRO, in the model's file: fp32's own, or one over flat or single fp32 copies of 16-bit weights.

These files number parameters and name none. Which is which follows from the model's order, the shapes and, where
there are fp32 copies, their values; where that leaves a choice nothing is guessed.

From 0.18.3 on, `engine.backward` at ZeRO stage 0 scales no loss, while the step of DeepSpeed's 16-bit optimizers
still divides the gradients by the scale: Adam's first moments are too small by the scale, its second ones by the
square of it. Adam's own updates hide that, except for eps; gradients of the right size that follow on such moments do
not. bf16 has no scale there since 0.18.6. Such moments are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.deepspeed.files.fields import (
    ModelFile,
    OptimizerState,
    UnshardedOptimizer,
    moments_of,
    scalars_of,
    weight_kind,
)
from thinwire.deepspeed.files.model_files import ModelFiles
from thinwire.engine.errors import CheckpointError
from thinwire.zero import SavedSlice

_MOST_WAYS = 100_000

# Releases that do so. 0.19.8 is the last that was looked at.
_FIRST, _LAST, _LAST_IN_BF16 = (0, 18, 3), (0, 19, 8), (0, 18, 5)


def _refuse_missing_scale(version: str | None, optimizer: UnshardedOptimizer, dtype: torch.dtype) -> None:
    """Raise CheckpointError for a file of stage 0 by DeepSpeed's `version` whose `optimizer`, which runs over copies of
    weights of this dtype, has moments of divided gradients."""
    numbers = re.match(r"\s*v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})", version or "")
    scale = optimizer.cur_scale
    if numbers is None or scale is None:
        return
    release = tuple(int(one) for one in numbers.groups())
    if scale != 1 and _FIRST <= release <= (_LAST if dtype == torch.float16 else _LAST_IN_BF16):
        raise CheckpointError(
            f"DeepSpeed {'.'.join(numbers.groups())} divided the gradients by the loss scale, {scale:g}, though at "
            f"stage 0 it had not multiplied the loss by it: the moments in {optimizer.path} are of no use. Import the "
            "weights alone, with --weights-only"
        )


@dataclass(frozen=True)
class _Group:
    """One parameter group. `copies`: its fp32 copies, one of the whole group where they are `flat`, or None. `states`:
    of each of `copies`, or of each parameter."""

    settings: Mapping[str, Any]
    states: Sequence[Mapping[str, Any]]
    copies: Sequence[Tensor] | None
    flat: bool


def read_unsharded(model: ModelFiles) -> OptimizerState:
    """What "optimizer" of the model's file holds. Raises CheckpointError where it cannot be told whose it is."""
    file = model.files[0]
    if file.optimizer is None:
        return OptimizerState()
    held = UnshardedOptimizer.of(file.path, file.optimizer)
    groups = _groups(held)
    settings = [group.settings for group in groups]
    dtypes = {tensor.dtype for tensor in model.module.values()} & {torch.float16, torch.bfloat16}
    if dtypes and any(group.copies is not None for group in groups):
        dtype = torch.float16 if torch.float16 in dtypes else torch.bfloat16
        _refuse_missing_scale(file.ds_version, held, dtype)
    owners = _assign(model, groups, file)
    slices: list[SavedSlice] = []
    for group, names in zip(groups, owners, strict=True):
        offset = 0
        for number, name in enumerate(names):
            tensor = model.module[name]
            at = 0 if group.flat else number
            state = group.states[at] if at < len(group.states) else {}
            cut = slice(offset, offset + tensor.numel()) if group.flat else slice(None)
            single = not group.flat and tensor.dim() == 0
            kinds = moments_of(state, single)
            if group.copies is not None and weight_kind(tensor.dtype) == "master":
                kinds["master"] = group.copies[at]
            for kind, one in kinds.items():
                run = one.reshape(-1)[cut]
                if run.numel() != tensor.numel():
                    raise CheckpointError(f"{kind} of {name} in {file.path} has {run.numel()} values")
                slices.append(SavedSlice(kind, name, 0, run))
            if state:
                slices += scalars_of(state, group.settings, name, f"{name} in {file.path}", single)
            offset += tensor.numel()
    return OptimizerState([one for one in slices if one.tensor.numel()], settings, held)


def _groups(held: UnshardedOptimizer) -> list[_Group]:
    packed = held.optimizer_state_dict
    counts = [len(one.params) for one in packed.param_groups]
    flat = held.fp32_groups_flat is not None
    copies = [[one] for one in held.fp32_groups_flat or ()] if flat else held.fp32_groups
    if copies is not None and [len(one) for one in copies] != ([1] * len(counts) if flat else counts):
        raise CheckpointError(f"{held.path} holds fp32 copies of other groups than param_groups has")
    groups = []
    for number, one in enumerate(packed.param_groups):
        own = [packed.state.get(key, {}) for key in one.params]
        groups.append(_Group(one.settings(), own, None if copies is None else copies[number], flat))
    return groups


def _assign(model: ModelFiles, groups: Sequence[_Group], file: ModelFile) -> list[list[str]]:
    """The names of each group's parameters, in the model's order: every one is tried in turn as the next of each group,
    and one way to place all of them must be left."""
    names = list(model.module)
    goals = tuple(
        group.copies[0].numel() if group.flat and group.copies else len(group.settings.get("params", ()))
        for group in groups
    )
    spare = len(names) - sum(goals) if not any(group.flat for group in groups) else None
    # Where each group stands -> (in how many ways that was reached, from where, the group that took the last name).
    start = (0,) * len(groups)
    layers: list[dict[tuple[int, ...], tuple[int, tuple[int, ...], int]]] = [{start: (1, start, -1)}]
    for name in names:
        layer: dict[tuple[int, ...], tuple[int, tuple[int, ...], int]] = {}
        for places, (ways, _, _) in layers[-1].items():
            for number, after in _moves(model.module[name], groups, places, spare != 0):
                known = layer.get(after)
                layer[after] = (min(2, ways + (known[0] if known else 0)), places, number)
        layers.append(layer)
        if len(layer) > _MOST_WAYS:
            break
    ways = layers[-1].get(goals, (0, start, -1))[0] if len(layers) > len(names) else 2
    if ways != 1:
        which = "no way to tell" if not ways else "more than one way in"
        raise CheckpointError(
            f"{file.path} is of stage 0, where optimizers number parameters and name none, and there is {which} which "
            "its parameters are the optimizer's. Load it in DeepSpeed with ZeRO stage 1, save that, and import it; or "
            "import the weights alone, with --weights-only"
        )
    owners: list[list[str]] = [[] for _ in groups]
    places = goals
    for name, layer in zip(reversed(names), reversed(layers[1:]), strict=True):
        _, before, number = layer[places]
        if number >= 0:
            owners[number].insert(0, name)
        places = before
    return owners


def _moves(
    tensor: Tensor, groups: Sequence[_Group], places: tuple[int, ...], may_be_left_out: bool
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(group, where all groups stand then) for each group that this parameter can be the next of; -1 for none."""
    for number, group in enumerate(groups):
        place = places[number]
        if _fits(tensor, group, place):
            step = tensor.numel() if group.flat else 1
            yield number, (*places[:number], place + step, *places[number + 1 :])
    if may_be_left_out:
        yield -1, places


def _fits(tensor: Tensor, group: _Group, place: int) -> bool:
    if group.flat:
        assert group.copies is not None
        copy = group.copies[0][place : place + tensor.numel()]
        return copy.numel() == tensor.numel() > 0 and torch.equal(copy.to(tensor.dtype), tensor.reshape(-1))
    if place >= len(group.settings.get("params", ())):
        return False
    if group.copies is not None:
        copy = group.copies[place]
        return copy.shape == tensor.shape and torch.equal(copy.to(tensor.dtype), tensor)
    shapes = {tuple(one.shape) for one in moments_of(group.states[place]).values()}
    return not group.states[place] or shapes == ({tuple(tensor.shape)} if tensor.dim() else set())
