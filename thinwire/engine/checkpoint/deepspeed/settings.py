"""What DeepSpeed's files say of optimizer, schedule and loss scale, in the words of this engine's checkpoints."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.checkpoint.deepspeed.fields import number_of
from thinwire.engine.checkpoint.deepspeed.stand_ins import Record
from thinwire.optim import registry

__all__ = ["loss_scale_of", "optimizer_counters", "schedule_of"]

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
        name, why = _torch_name(section["type"]), f'DeepSpeed\'s configuration says "{section["type"]}"'
    if name is None and groups:
        name, why = _by_settings(groups[0]), "the settings of its parameter groups are that class's"
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


def _torch_name(name: str) -> str | None:
    """torch's class of that name, in any case; DeepSpeed's own by the name that its configurations have."""
    by_lower = {one.lower(): one for one in (*dir(torch.optim), *registry.NAMES) if one[:1].isupper()}
    return by_lower.get(name.lower(), name)


def _by_settings(group: Mapping[str, Any]) -> str | None:
    if group.keys() >= _OF_ADAM:
        return "AdamW" if group.get("decoupled_weight_decay", True) else "Adam"
    return "SGD" if "momentum" in group and "nesterov" in group else None


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
    """What JSON keeps of a value; entries that it does not keep are left out."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items() if isinstance(key, str) and _is_plain(one)}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) for key in value)
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, bool | int | str)
