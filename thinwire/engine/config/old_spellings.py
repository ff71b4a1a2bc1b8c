"""What DeepSpeed wrote otherwise in earlier years, put into today's words before anything else reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.engine.config.errors import shown

__all__ = ["respell"]

_OFFLOADS = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}


def respell(tree: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """A copy of `tree` without old spellings; `tree` and what it holds stay as they are.

    `bfloat16` is `bf16`; `zero_optimization: true` is stage 1; `cpu_offload` and `cpu_offload_param` are the sections
    that replaced them; `max_grad_norm` of an optimizer is `gradient_clipping`. What an old and a new spelling say
    differently joins `problems`.
    """
    tree = dict(tree)
    if "bfloat16" in tree:
        _rename(tree, "bfloat16", "bf16", tree["bfloat16"], "", problems)
    if isinstance(zero := tree.get("zero_optimization"), bool):
        tree["zero_optimization"] = {"stage": int(zero)}
    elif isinstance(zero, Mapping):
        tree["zero_optimization"] = _respell_offload(dict(zero), problems)
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
        if old not in zero:
            continue
        value = zero[old]
        if not isinstance(value, bool) and value not in (None, "auto"):
            problems.append(f'"zero_optimization.{old}" must be true or false, got {shown(value)}')
            del zero[old]
        elif value is True:
            section = {"device": "cpu"} | ({"pin_memory": True} if pinned is True else {})
            _rename(zero, old, new, section, "zero_optimization.", problems)
        else:
            del zero[old]
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
    del section[old]
    if section.get(new) in (None, value):
        section[new] = value
    else:
        problems.append(
            f'"{prefix}{old}" is the old name of "{prefix}{new}", and both are there: keep "{prefix}{new}" alone'
        )
