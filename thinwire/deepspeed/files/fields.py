"""Values of DeepSpeed's dictionaries, checked as they are taken out, and in the words of this engine's checkpoints.

A value that is missing, or of another type, is an error that names it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.deepspeed.files.pickles import Record
from thinwire.engine.errors import CheckpointError
from thinwire.engine.saved_job import json_part
from thinwire.optim import registry
from thinwire.zero import SavedSlice

Kind = TypeVar("Kind")

_NO_LENGTH = 1 << 62


class Entry:
    """A dictionary of the file `path`, at `place` in it."""

    def __init__(self, path: Path, values: Any, place: str = "") -> None:
        self.path = path
        self._place = place
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{self.where('')} is {type(values).__name__}, a dictionary was expected")
        self.values = values

    def where(self, key: object) -> str:
        """How messages call a value in here."""
        parts = [part for part in (self._place, str(key)) if part]
        return f"{'.'.join(parts)} in {self.path}" if parts else f"{self.path}"

    def take(self, key: object, kind: type[Kind] | tuple[type[Kind], ...]) -> Kind:
        """The value under `key`, which must be there and of this type."""
        value = self._needed(key)
        if not isinstance(value, kind):
            names = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
            raise CheckpointError(f"{self.where(key)} is {type(value).__name__}, {names} was expected")
        return value

    def below(self, key: object) -> Entry:
        """The dictionary under `key`."""
        return Entry(self.path, self._needed(key), self._named(key))

    def get(self, key: object, default: Any = None) -> Any:
        """The value under `key`, whatever it is."""
        return self.values.get(key, default)

    def _needed(self, key: object) -> Any:
        if key not in self.values:
            raise CheckpointError(f"{self.path} holds no {self._named(key)}: it is of another version, or not whole")
        return self.values[key]

    def _named(self, key: object) -> str:
        return f"{self._place}.{key}" if self._place else str(key)


def shape_of(value: Any, where: str) -> tuple[int, ...]:
    """A torch.Size, or a sequence of whole numbers, as a shape."""
    if not isinstance(value, Sequence) or not all(type(one) is int and one >= 0 for one in value):
        raise CheckpointError(f"{where} is no shape")
    if math.prod(value) > _NO_LENGTH:
        raise CheckpointError(f"{where} is a shape of more elements than there can be")
    return tuple(value)


def flat_tensor(value: Any, where: str) -> Tensor:
    """A one-dimensional floating-point tensor."""
    if not isinstance(value, Tensor) or value.dim() != 1 or not value.is_floating_point():
        raise CheckpointError(f"{where} is no one-dimensional floating-point tensor")
    return value


def number_of(value: Any, where: str) -> float:
    """A number, a tensor of one, or the number that an enumeration's member stands for."""
    if isinstance(value, Record) and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{where} is no number")
    return value


_SCALAR = "scalar."
_STEP = "step"


@dataclass(frozen=True)
class OptimizerState:
    """`slices`: weights that lie with the optimizer, and its moments and step counts. `groups`: settings of each group,
    as DeepSpeed's files have them. `loss_scale`: where fp16's scale is described, or None."""

    slices: list[SavedSlice] = field(default_factory=list)
    groups: list[Mapping[str, Any]] = field(default_factory=list)
    loss_scale: Any = None


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


# Of a parameter group: beside what a class takes by name, what schedules put there.
_OF_SCHEDULES = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
_DEEPSPEEDS_SCHEDULES = frozenset({"LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"})
_OF_ADAM = frozenset({"betas", "eps", "weight_decay"})


def optimizer_counters(
    groups: Sequence[Mapping[str, Any]], config: Mapping[str, Any], asked_for: str | None
) -> tuple[dict[str, Any] | None, str]:
    """What an optimizer of this engine takes up as its counters, and why: None where the class cannot be told.

    `asked_for`: the class by name, instead of what DeepSpeed's configuration and the groups themselves say.
    """
    section = config.get("optimizer")
    section = section if isinstance(section, Mapping) else {}
    params = section.get("params")
    params = params if isinstance(params, Mapping) else {}
    name, why = asked_for, "as asked for"
    if name is None and isinstance(section.get("type"), str):
        by_lower = {one.lower(): one for one in (*dir(torch.optim), *registry.NAMES) if one[:1].isupper()}
        name = by_lower.get(section["type"].lower(), section["type"])
        why = f'DeepSpeed\'s configuration says "{section["type"]}"'
    if name is None and groups:
        why = "the settings of its parameter groups are that class's"
        if groups[0].keys() >= _OF_ADAM:
            name = "AdamW" if groups[0].get("decoupled_weight_decay", True) else "Adam"
        elif "momentum" in groups[0] and "nesterov" in groups[0]:
            name = "SGD"
    if name is None:
        return None, "neither DeepSpeed's configuration nor the parameter groups say of which class"
    if name in registry.NAMES:
        return None, f"{name} keeps another state than DeepSpeed's, and begins anew from the weights"
    decoupled = params.get("adam_w_mode", True)
    return {"optimizer": name, "groups": [_settings(name, one, decoupled) for one in groups]}, why


def schedule_of(state: Any, config: Mapping[str, Any], asked_for: str | None) -> dict[str, Any] | None:
    """A schedule's class and state; None where there is none, or its class cannot be told."""
    section = config.get("scheduler")
    given = section.get("type") if isinstance(section, Mapping) else None
    name = asked_for if asked_for is not None else given
    if not isinstance(state, Mapping) or not isinstance(name, str):
        return None
    if name in _DEEPSPEEDS_SCHEDULES:
        # DeepSpeed counts steps from -1.
        last = number_of(state.get("last_batch_iteration", -1), "lr_scheduler.last_batch_iteration")
        return {"type": name, "state": {"last_epoch": int(last) + 1}}
    return {"type": name, "state": _plain(state)}


def loss_scale_of(scaler: Any) -> dict[str, Any] | None:
    """The state of a dynamic loss scale; None where it is fixed, or there is none."""
    fields = scaler.fields if isinstance(scaler, Record) else scaler
    if not isinstance(fields, Mapping) or not fields.get("dynamic", fields.get("dynamic_loss_scale", False)):
        return None
    done, overflow = (int(number_of(fields.get(key, 0), key)) for key in ("cur_iter", "last_overflow_iter"))
    state = {
        "value": float(number_of(fields.get("cur_scale"), "cur_scale")),
        "steps_without_overflow": max(0, done - 1 - overflow),
    }
    if "cur_hysteresis" in fields:
        state["forbearance"] = max(0, int(number_of(fields["cur_hysteresis"], "cur_hysteresis")))
    return state


def _settings(name: str, group: Mapping[str, Any], decoupled: Any) -> dict[str, Any]:
    """A group's settings that the class has, as plain values."""
    optimizer = getattr(torch.optim, name, None)
    known = set(inspect.signature(optimizer).parameters) | _OF_SCHEDULES if optimizer is not None else group.keys()
    settings = {key: _plain(value) for key, value in group.items() if key in known and key != "params"}
    if name in ("Adam", "AdamW"):
        settings["decoupled_weight_decay"] = bool(group.get("decoupled_weight_decay", decoupled or name == "AdamW"))
    # Where a step runs is this job's own matter.
    return {key: value for key, value in settings.items() if key not in ("foreach", "fused", "capturable")}


def _plain(value: Any) -> Any:
    """What JSON keeps of a value, tensors of one value among it; entries that it does not keep are left out."""
    return json_part(_with_numbers(value))


def _with_numbers(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        return {key: _with_numbers(one) for key, one in value.items()}
    return [_with_numbers(one) for one in value] if isinstance(value, list | tuple) else value
