"""Optimizers without ZeRO, in the model's file: fp32's own, or one over flat or single fp32 copies of 16-bit weights.

These files number parameters and name none. Which is which follows from the model's order, the shapes and, where
there are fp32 copies, their values; where that leaves a choice nothing is guessed.

From 0.18.3 on, `engine.backward` at ZeRO stage 0 scales no loss, while the step of DeepSpeed's 16-bit optimizers
still divides the gradients by the scale: Adam's first moments are too small by the scale, its second ones by the
square of it. Adam's own updates hide that, except for eps; gradients of the right size that follow on such moments do
not. bf16 has no scale there since 0.18.6. Such moments are multiplied up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.deepspeed.files.fields import (
    Entry,
    OptimizerState,
    flat_tensor,
    moments_of,
    number_of,
    scalars_of,
    weight_kind,
)
from thinwire.deepspeed.files.model_files import ModelFiles
from thinwire.engine.errors import CheckpointError
from thinwire.zero import SavedSlice

# Releases that do so. 0.19.8 is the last that was looked at.
_FIRST, _LAST, _LAST_IN_BF16 = (0, 18, 3), (0, 19, 8), (0, 18, 5)
_OF_SCALES = {"cur_scale": 1.0, "cur_iter": 0, "last_overflow_iter": -1, "scale_window": 1000}
# From here on second moments of gradients that eps does not drown have vanished in fp32, while the first ones have not.
_LARGEST = 2.0**31
# Kind of moment -> the power of the gradient in it, and where its group says how fast it forgets.
_POWERS = {
    "exp_avg": (1, "betas", 0),
    "exp_avg_sq": (2, "betas", 1),
    "max_exp_avg_sq": (2, "betas", 1),
    "momentum_buffer": (1, "momentum", 0),
}
# Doublings looked back on: gradients of before weigh nothing, and a float holds the square of so many.
_MOST_DOUBLINGS = 400


@dataclass(frozen=True)
class MissingScale:
    """What gradients were divided by: `scale` in the last of `done` steps. A dynamic one (`window` is not None) doubled
    after every `window` steps from `overflow` on, the last step that overflowed, or -1."""

    version: str
    scale: float
    done: int = 0
    overflow: int = -1
    window: int | None = None

    def restore(self, kind: str, moment: Tensor, settings: Mapping[str, Any]) -> Tensor:
        """A moment of the gradients themselves, of a parameter in a group of these `settings`.

        Exact for a scale that stayed the same. Where it doubled, as if gradients had been as large as each other all
        along. Moments of another kind are as they were.
        """
        if kind not in _POWERS:
            return moment
        power, name, place = _POWERS[kind]
        decay = settings.get(name, 0.0)
        if isinstance(decay, list | tuple):
            decay = decay[place] if len(decay) > place else 0.0
        decay = min(max(0.0, number_of(decay, f"{name} of a parameter group")), 1.0)
        return moment * (self.scale**power / self._relative(decay, power))

    def note(self) -> str:
        """What the import says of it."""
        return (
            f"{_fault(self.version, self.scale)}: the moments are multiplied up to those of the gradients themselves, "
            "and the loss scale begins as this job's configuration says. Steps may be larger than DeepSpeed's were, "
            "where its gradients had become as small as the optimizer's eps"
        )

    def _relative(self, decay: float, power: int) -> float:
        """The mean of (scale / the scale of a step)^power over all steps, each weighed as the moment remembers it."""
        total = weights = 0.0
        age = 0
        for steps, smaller in self._runs():
            weight = decay**age * (1 - decay**steps)
            total += weight * smaller**power
            weights += weight
            age += steps
        return total / weights if weights else 1.0

    def _runs(self) -> Iterator[tuple[int, float]]:
        """(steps, `scale` over theirs) of steps with the same scale, the last ones first."""
        if self.window is None:
            return
        doublings, rest = divmod(self.done - self.overflow - 2, self.window)
        yield rest + 1, 1.0
        for number in range(1, min(doublings, _MOST_DOUBLINGS) + 1):
            yield self.window, 2.0**number
        if self.overflow > 0 and doublings <= _MOST_DOUBLINGS:
            yield self.overflow, 2.0 ** (doublings - 1)


def find_missing_scale(version: Any, optimizer: Entry, dtype: torch.dtype) -> MissingScale | None:
    """The scale that is missing in a file of stage 0 by DeepSpeed's `version`, whose `optimizer` runs over copies of
    weights of this dtype; None where none is. Raises CheckpointError for a scale of which no moment is left."""
    numbers = re.match(r"\s*v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})", version) if isinstance(version, str) else None
    if numbers is None or "cur_scale" not in optimizer.values:
        return None
    release = tuple(int(one) for one in numbers.groups())
    if not _FIRST <= release <= (_LAST if dtype == torch.float16 else _LAST_IN_BF16):
        return None
    name = ".".join(numbers.groups())
    scale, done, overflow, window = (
        number_of(optimizer.get(key, default), optimizer.where(key)) for key, default in _OF_SCALES.items()
    )
    if not 0 < scale < _LARGEST:
        raise CheckpointError(
            f"{_fault(name, scale)}: nothing can be made of the moments in {optimizer.path}. Import the weights alone, "
            "with --weights-only"
        )
    if scale == 1:
        return None
    if not optimizer.get("dynamic_loss_scale") or not -1 <= overflow < done - 1 or not window >= 1:
        return MissingScale(name, scale)
    return MissingScale(name, scale, int(done), int(overflow), int(window))


def _fault(version: str, scale: float) -> str:
    return (
        f"DeepSpeed {version} divided the gradients by the loss scale, {scale:g}, though at stage 0 it had not "
        "multiplied the loss by it"
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
    if file.get("optimizer") is None:
        return OptimizerState()
    held = file.below("optimizer")
    packed = held.below("optimizer_state_dict") if "optimizer_state_dict" in held.values else held
    groups = _groups(held, packed)
    scaler = held.values if "cur_scale" in held.values else None
    settings = [group.settings for group in groups]
    missing = None
    dtypes = {tensor.dtype for tensor in model.module.values()} & {torch.float16, torch.bfloat16}
    if dtypes and any(group.copies is not None for group in groups):
        dtype = torch.float16 if torch.float16 in dtypes else torch.bfloat16
        missing = find_missing_scale(file.get("ds_version"), held, dtype)
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
                if missing is not None:
                    run = missing.restore(kind, run, group.settings)
                slices.append(SavedSlice(kind, name, 0, run))
            if state:
                slices += scalars_of(state, group.settings, name, f"{name} in {file.path}", single)
            offset += tensor.numel()
    slices = [one for one in slices if one.tensor.numel()]
    if missing is None:
        return OptimizerState(slices, settings, scaler)
    # No overflow ever held that scale down.
    return OptimizerState(slices, settings, notes=[missing.note()])


def _groups(held: Entry, packed: Entry) -> list[_Group]:
    states = packed.below("state").values
    flats, singles = held.get("fp32_groups_flat"), held.get("fp32_groups")
    groups = []
    for number, one in enumerate(packed.take("param_groups", list)):
        settings = Entry(held.path, one, f"param_groups.{number}").values
        keys = settings.get("params", [])
        own = [states.get(key, {}) for key in keys]
        copies: Sequence[Tensor] | None = None
        if isinstance(flats, list) and number < len(flats):
            copies = [flat_tensor(flats[number], held.where(f"fp32_groups_flat.{number}"))]
        elif isinstance(singles, list) and number < len(singles):
            copies = [one for one in singles[number]]
        groups.append(_Group(settings, own, copies, isinstance(flats, list)))
    return groups


def _assign(model: ModelFiles, groups: Sequence[_Group], file: Entry) -> list[list[str]]:
    """The names of each group's parameters, in its order, which is the model's within a group.

    Every parameter of the model is tried in turn as the next of each group; what is left of the ways to place all of
    them must be one.
    """
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
    ways = layers[-1].get(goals, (0, start, -1))[0]
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
