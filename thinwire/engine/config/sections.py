"""The optimizer and scheduler sections: names of classes, and whether their parameters fit, with nothing built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from thinwire.comm.elastic import Elastic
from thinwire.engine.config.errors import did_you_mean, dotted, shown, validated
from thinwire.engine.config.models import OptimizerConfig
from thinwire.engine.config.options import LOCAL_UPDATES, OPTIMIZERS, SCHEDULES, LocalUpdatesOptions
from thinwire.engine.schedules import WHY_REFUSED
from thinwire.optim import registry
from thinwire.optim.settings import ElasticOptions, OptionModel
from thinwire.zero.shard_optimizer import WHY_NOT_SHARDED

_PARAMS, _INNER = "optimizer.params", "optimizer.params.inner"
_DEFAULT_INNER = "AdamW"

_NAMES = (*registry.NAMES, LOCAL_UPDATES, *OPTIMIZERS)
_OF_BOTH = LocalUpdatesOptions.model_fields.keys()
_BY_LOWER = {name.lower(): name for name in (*_NAMES, *WHY_NOT_SHARDED)}


def is_local_updates(kind: object) -> bool:
    """Whether a section of this type is DiLoCo's, in any case."""
    return isinstance(kind, str) and kind.lower() == LOCAL_UPDATES.lower()


def uncompressed_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of that name which sends gradients exactly: one of ours or torch's."""
    found: type[torch.optim.Optimizer] = registry.exact(name) if name in registry.EXACT else getattr(torch.optim, name)
    return found


def options_of(kind: str) -> type[OptionModel] | None:
    """The model of an optimizer's arguments, by its name in any case; None for an unknown one."""
    name = _BY_LOWER.get(kind.lower(), "")
    if name in registry.NAMES:
        return registry.entry(name).options
    return LocalUpdatesOptions if name == LOCAL_UPDATES else OPTIMIZERS.get(name)


def refusal_of(kind: str, path: str = "optimizer") -> str | None:
    """A sentence that refuses the type of the section at `path`; None for one that can be sharded."""
    name = _BY_LOWER.get(kind.lower())
    if name is None:
        return f'"{path}.type" {shown(kind)} is not a known optimizer.{did_you_mean(kind, _NAMES)}'
    why = WHY_NOT_SHARDED.get(name)
    return None if why is None else f'"{path}.type" {shown(kind)} is not supported: {why}'


def check_optimizer(
    tree: Mapping[str, Any], problems: list[str], unlisted: frozenset[str] = frozenset(), path: str = "optimizer"
) -> dict[str, Any]:
    """{"type", "params"} with the type's proper name and exactly the keyword arguments that its class takes.

    What cannot work joins `problems`; nothing is built. `unlisted`: paths of keys that another dialect knows. `path`:
    of the section.
    """
    kind, params = tree.get("type"), tree.get("params", {})
    if not isinstance(kind, str) or not isinstance(params, Mapping):
        return dict(tree)  # the model of the section says what is wrong with them
    if (refusal := refusal_of(kind, path)) is not None:
        problems.append(refusal)
        return dict(tree)
    name, options = _BY_LOWER[kind.lower()], options_of(kind)
    assert options is not None
    if name == LOCAL_UPDATES:
        return {**tree, "type": name, "params": _local_updates(params, problems, unlisted)}
    found = validated(options, params, f"{path}.params", problems, name, unlisted)
    if isinstance(elastic := getattr(found, "elastic", None), ElasticOptions):
        try:
            Elastic(**elastic.model_dump())
        except ValueError as error:
            problems.append(f'"{path}.params.elastic" cannot work: {error}')
    return {**tree, "type": name, "params": {} if found is None else found.given()}


def with_lr_inside(params: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """A copy of DiLoCo's `params` in which "inner" is a section with a type and params of its own, among them "lr".

    An "inner" of another kind is None, with a problem that joins `problems`.
    """
    params = dict(params)
    inner = params.get("inner")
    inner = {"type": _DEFAULT_INNER} if inner is None else {"type": inner} if isinstance(inner, str) else inner
    if not isinstance(inner, Mapping) or not isinstance(inner.get("params", {}), Mapping):
        problems.append(
            f'"{_INNER}" must be the section of an optimizer, as {{"type": "AdamW", "params": {{}}}}, got '
            f"{shown(inner)}"
        )
        return {**params, "inner": None}
    own = dict(inner.get("params", {}))
    if "lr" in params:
        if "lr" in own:
            problems.append(
                f'"{_PARAMS}.lr" and "{_INNER}.params.lr" are the same rate, the inner optimizer\'s: give one'
            )
        own["lr"] = params.pop("lr")
    return {**params, "inner": {"type": _DEFAULT_INNER, **inner, "params": own}}


def _local_updates(params: Mapping[str, Any], problems: list[str], unlisted: frozenset[str]) -> dict[str, Any]:
    """DiLoCo's arguments, with the checked section of the inner optimizer among them."""
    params = with_lr_inside(params, problems)
    inner = params.pop("inner")
    kind = inner["type"] if inner is not None else _DEFAULT_INNER
    # What people write one level too high.
    known = options_of(kind) if isinstance(kind, str) else None
    for name in [name for name in params if known and name in known.model_fields.keys() - _OF_BOTH]:
        del params[name]
        problems.append(
            f'"{dotted(_PARAMS, name)}" is a parameter of the inner optimizer, {shown(kind)}: write it into '
            f'"{_INNER}.params"'
        )
    found = validated(LocalUpdatesOptions, params, _PARAMS, problems, LOCAL_UPDATES, unlisted)
    options = {} if found is None else found.given()
    if inner is not None and (section := _inner_section(inner, problems, unlisted)) is not None:
        options["inner"] = section
    return options


def _inner_section(inner: Mapping[str, Any], problems: list[str], unlisted: frozenset[str]) -> dict[str, Any] | None:
    section = validated(OptimizerConfig, inner, _INNER, problems)
    if section is None:
        return None
    kind, own = section.type, dict(section.params)
    if _BY_LOWER.get(kind.lower()) in (*registry.NAMES, LOCAL_UPDATES):
        problems.append(
            f'"{_INNER}.type" {shown(kind)} communicates by itself, and the inner optimizer of {LOCAL_UPDATES} steps '
            f"alone: use one of {', '.join(OPTIMIZERS)}"
        )
        return None
    for name in sorted(own.keys() & _OF_BOTH):
        problems.append(
            f'"{dotted(_INNER, "params", name)}" is a parameter of {LOCAL_UPDATES}: write it into "{_PARAMS}"'
        )
        del own[name]
    return check_optimizer({"type": kind, "params": own}, problems, unlisted, _INNER)


def check_scheduler(
    tree: Mapping[str, Any], problems: list[str], unlisted: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """{"type", "params"} with exactly the keyword arguments that the schedule takes besides the optimizer.

    What cannot work joins `problems`; nothing is built. `unlisted`: paths of keys that another dialect knows.
    """
    name, params = tree.get("type"), tree.get("params", {})
    if not isinstance(name, str) or not isinstance(params, Mapping):
        return dict(tree)  # the model of the section says what is wrong with them
    if name not in SCHEDULES:
        if (refused := WHY_REFUSED.get(name)) is not None:
            problems.append(
                f'"scheduler.type" "{name}" is not supported: {refused}. Pass a schedule of your own to '
                "thinwire.initialize, or step it yourself"
            )
        else:
            hint = did_you_mean(name, list(SCHEDULES))
            problems.append(f'"scheduler.type" {shown(name)} is not a known schedule.{hint}')
        return dict(tree)
    found = validated(SCHEDULES[name], params, "scheduler.params", problems, name, unlisted)
    return {"type": name, "params": {} if found is None else found.given()}
