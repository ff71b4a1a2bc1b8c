"""A configuration of DeepSpeed's in the engine's words: files, old spellings, names, keys without a counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from thinwire.deepspeed.config.keys import DECLINED, PARAMETERS_DECLINED, WITHOUT_EFFECT, parameters_without_effect
from thinwire.deepspeed.config.relaxed_json import read_relaxed_json
from thinwire.engine.config.errors import dotted, shown
from thinwire.engine.config.loading import Notes
from thinwire.engine.config.options import LOCAL_UPDATES, SCHEDULES
from thinwire.engine.config.sections import is_local_updates, options_of
from thinwire.optim import registry

# Classes that compute what one of torch's does.
_SAME_AS = {
    "fusedadam": "Adam",
    "deepspeedcpuadam": "Adam",
    "deepspeedcpuadagrad": "Adagrad",
    "fusedlamb": "Lamb",
    "fusedlion": "Lion",
    "deepspeedcpulion": "Lion",
}
_REFUSED = {
    "muadam": "scale the learning rate of your parameter groups and use Adam",
    "muadamw": "scale the learning rate of your parameter groups and use AdamW",
    "musgd": "scale the learning rate of your parameter groups and use SGD",
}
_OWN_COMMUNICATOR = ("compressed", "hccl")
_UNLISTED = frozenset((*DECLINED, *WITHOUT_EFFECT))


def read(text: str) -> Any:
    """The content of a configuration's file. Raises ValueError, with the place, for what cannot be read."""
    return read_relaxed_json(text)


def translate(tree: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """A copy of `tree`, respelled, without DeepSpeed's keys that have no counterpart.

    Those that cannot change a result join the notes, with the reason; so does a problem for each of the others.
    """
    notes.unlisted = _UNLISTED
    kept = _without_foreign(respell(tree, notes.problems), "", notes)
    if isinstance(section := kept.get("pipeline"), Mapping) and section.get("stages") == "auto":
        kept["pipeline"] = {key: value for key, value in section.items() if key != "stages"}
    if isinstance(section := kept.get("optimizer"), Mapping):
        kept["optimizer"] = _optimizer(section, "optimizer", notes)
    section = kept.get("scheduler")
    if isinstance(section, Mapping) and isinstance(section.get("params"), Mapping):
        params = _without_declined("scheduler", section["params"], SCHEDULES.get(str(section.get("type"))), notes)
        kept["scheduler"] = {**section, "params": params}
    return kept


def _without_foreign(tree: Mapping[str, Any], prefix: str, notes: Notes) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        path = dotted(prefix, str(key))
        if (idle := WITHOUT_EFFECT.get(path)) is not None:
            if value is not None:
                idle.note(path, value, notes)
        elif (declined := DECLINED.get(path)) is not None:
            if value is not None and not declined.accepts(value):
                notes.problems.append(declined.refusal(path, value))
        elif isinstance(value, Mapping) and path not in ("optimizer.params", "scheduler.params"):
            kept[key] = _without_foreign(value, path, notes)
        else:
            kept[key] = value
    return kept


def _optimizer(section: Mapping[str, Any], path: str, notes: Notes) -> dict[str, Any]:
    kind, params = section.get("type"), section.get("params", {})
    if not isinstance(kind, str) or not isinstance(params, Mapping):
        return dict(section)
    if (why := _REFUSED.get(kind.lower())) is not None:
        notes.problems.append(f'"{path}.type" {shown(kind)} is not supported: {why}')
        return {"type": "SGD"}
    kind = _SAME_AS.get(kind.lower(), kind)
    params = _without_idle(kind, params, f"{path}.params", notes)
    if kind.lower() == "adam" and "adam_w_mode" in params:
        if "decoupled_weight_decay" in params:
            notes.problems.append(
                f'"{path}.params": "adam_w_mode" and "decoupled_weight_decay" mean the same: give one'
            )
        mode = params.pop("adam_w_mode")
        if not isinstance(mode, bool):
            notes.problems.append(f'"{path}.params.adam_w_mode" must be true or false, got {shown(mode)}')
        else:
            params.setdefault("decoupled_weight_decay", mode)
    if is_local_updates(kind) and isinstance(inner := params.get("inner"), Mapping):
        params["inner"] = _optimizer({"type": "AdamW", **inner}, f"{path}.params.inner", notes)
    params = _without_declined(path, params, options_of(kind), notes)
    return {**section, "type": kind, "params": params}


def _without_idle(kind: str, params: Mapping[str, Any], path: str, notes: Notes) -> dict[str, Any]:
    """`params` but those that cannot change a step."""
    own = {name.lower(): name for name in (*registry.NAMES, LOCAL_UPDATES, "AdamW")}
    name = own.get(kind.lower(), kind)
    communicates = name in (*registry.NAMES, LOCAL_UPDATES)
    kept = dict(params)
    if communicates and kept.get("comm_backend_name") in _OWN_COMMUNICATOR:
        del kept["comm_backend_name"]
        notes.without_effect[f"{path}.comm_backend_name"] = "the job's communicator carries the bytes, as in DeepSpeed"
    idle = parameters_without_effect(name, communicates)
    for key in [key for key in params if key in idle]:
        idle[key].note(dotted(path, key), kept.pop(key), notes)
    return kept


def _without_declined(
    path: str, params: Mapping[str, Any], options: type[BaseModel] | None, notes: Notes
) -> dict[str, Any]:
    """`params` but those that the class has not, and that are known not to be there."""
    if options is None:
        return dict(params)
    kept: dict[str, Any] = {}
    for key, value in params.items():
        declined = PARAMETERS_DECLINED.get(f"{path.partition('.')[0]}.{key}")
        if declined is None or key in options.model_fields:
            kept[key] = value
        elif not declined.accepts(value):
            notes.problems.append(declined.refusal(dotted(path, "params", str(key)), value))
    return kept


_OFFLOADS = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}


def respell(tree: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """A copy of `tree` without what DeepSpeed wrote otherwise in earlier years; `tree` stays as it is.

    `bfloat16` is `bf16`; `zero_optimization: true` is stage 1; `cpu_offload` and `cpu_offload_param` are the sections
    that replaced them; `max_grad_norm` of an optimizer is `gradient_clipping`. What an old and a new spelling say
    differently joins `problems`.
    """
    tree = dict(tree)
    if "bfloat16" in tree:
        _rename(tree, "bfloat16", "bf16", tree.pop("bfloat16"), "", problems)
    if isinstance(zero := tree.get("zero_optimization"), bool):
        tree["zero_optimization"] = {"stage": int(zero)}
    elif isinstance(zero, Mapping):
        tree["zero_optimization"] = _respell_quantised(_respell_offload(dict(zero), problems), problems)
    _respell_clipping(tree, problems)
    return tree


def _respell_offload(zero: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    pinned = zero.pop("cpu_offload_use_pin_memory", None)
    if not isinstance(pinned, bool | None):
        problems.append(
            f'"zero_optimization.cpu_offload_use_pin_memory" must be true or false, got {shown(pinned)}: today it is '
            '"pin_memory" in "offload_optimizer" and "offload_param"'
        )
    for old, new in _OFFLOADS.items():
        value = zero.pop(old, None)
        if value is True:
            section = {"device": "cpu"} | ({"pin_memory": True} if pinned is True else {})
            _rename(zero, old, new, section, "zero_optimization.", problems)
        elif not isinstance(value, bool) and value not in (None, "auto"):
            problems.append(f'"zero_optimization.{old}" must be true or false, got {shown(value)}')
    return zero


_CODECS = {"zero_quantized_weights": ("weights_codec", "int8"), "zero_quantized_gradients": ("gradients_codec", "int4")}


def _respell_quantised(zero: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """ZeRO++'s switches as the codecs that it has, and the ranks of its secondary partition as those of a node."""
    for old, (new, codec) in _CODECS.items():
        value = zero.pop(old, None)
        if value is True:
            _rename(zero, old, new, codec, "zero_optimization.", problems)
        elif not isinstance(value, bool) and value not in (None, "auto"):
            problems.append(
                f'"zero_optimization.{old}" must be true or false, got {shown(value)}: true is "{new}": "{codec}"'
            )
    size = zero.pop("zero_hpz_partition_size", None)
    if size not in (None, "auto"):
        _rename(zero, "zero_hpz_partition_size", "node_size", size, "zero_optimization.", problems)
    return zero


def _respell_clipping(tree: dict[str, Any], problems: list[str]) -> None:
    """DeepSpeed clipped by an optimizer's `max_grad_norm` before it had `gradient_clipping`, and refuses it today."""
    optimizer = tree.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, Mapping) else None
    if not isinstance(optimizer, Mapping) or not isinstance(params, Mapping) or "max_grad_norm" not in params:
        return
    norm = params["max_grad_norm"]
    if norm and not isinstance(norm, bool | str):
        if tree.get("gradient_clipping") not in (None, norm):
            problems.append(
                f'"optimizer.params.max_grad_norm" is {shown(norm)} and "gradient_clipping" is '
                f"{shown(tree['gradient_clipping'])}, and both are the norm that gradients are clipped to: give one"
            )
        if tree.get("gradient_clipping") is None:
            tree["gradient_clipping"] = norm
        params = {name: value for name, value in params.items() if name != "max_grad_norm"}
        tree["optimizer"] = {**optimizer, "params": params}


def _rename(section: dict[str, Any], old: str, new: str, value: Any, prefix: str, problems: list[str]) -> None:
    if section.get(new) in (None, value):
        section[new] = value
    else:
        problems.append(
            f'"{prefix}{old}" is the old name of "{prefix}{new}", and both are there: keep "{prefix}{new}" alone'
        )
