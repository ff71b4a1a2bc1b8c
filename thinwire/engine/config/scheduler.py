"""The scheduler section: DeepSpeed's schedules and torch's, with their parameters checked before training starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from thinwire.engine.config.declined import Declined
from thinwire.engine.config.errors import CANNOT_WORK, did_you_mean, reason, shown
from thinwire.engine.config.params import check_params, expected_by
from thinwire.engine.config.trial import trial_class
from thinwire.engine.schedules import build_schedule, schedule_names, why_refused

__all__ = ["check_scheduler"]

_DECLINES = {
    "last_batch_iteration": Declined("a checkpoint says where to resume", (-1,)),
    "last_epoch": Declined("a checkpoint says where to resume", (-1,)),
    "scale_fn": Declined("it is a function; pass a schedule of your own to thinwire.initialize", (None,)),
    "verbose": Declined('use "steps_per_print"', (False,)),
}

_NOT_PARAMETERS = frozenset({"self", "optimizer", *_DECLINES})

# As many groups are built to check a schedule: an optimizer takes the square of their number to do so.
_MOST_GROUPS = 1024


def check_scheduler(tree: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """{"type", "params"} with exactly the keyword arguments that the schedule takes besides the optimizer.

    What cannot work joins `problems`.
    """
    name, params = tree.get("type"), tree.get("params", {})
    if not isinstance(name, str) or not isinstance(params, Mapping):
        return dict(tree)  # the model says what is wrong with them
    known = schedule_names()
    if name not in known:
        if (refused := why_refused(name)) is not None:
            problems.append(
                f'"scheduler.type" "{name}" is not supported: {refused}. Pass a schedule of your own to '
                "thinwire.initialize, or step it yourself"
            )
        else:
            problems.append(f'"scheduler.type" {shown(name)} is not a known schedule.{did_you_mean(name, list(known))}')
        return dict(tree)
    before = len(problems)
    expected = expected_by(known[name].__init__, _NOT_PARAMETERS)
    params = check_params("scheduler.params", name, params, expected, _DECLINES, problems)
    if len(problems) == before:
        _check_values(name, params, problems)
    return {"type": name, "params": params}


def _check_values(name: str, params: Mapping[str, Any], problems: list[str]) -> None:
    """What the class itself says about its values, on an optimizer with as many groups as the values ask for."""
    lists = {key: len(value) for key, value in params.items() if isinstance(value, list)}
    rates = {key: length for key, length in lists.items() if "lr" in key or key.endswith("_mom")}
    groups = max([1, *rates.values()])
    if groups > _MOST_GROUPS:
        longest = max(rates, key=rates.__getitem__)
        problems.append(
            f'"scheduler.params.{longest}" must be a number, or one for each parameter group, at most {_MOST_GROUPS}, '
            f"got {groups} of them"
        )
        return
    optimizer = trial_class(torch.optim.AdamW)([{"params": [torch.zeros(1)]} for _ in range(groups)])
    try:
        build_schedule(name, params, optimizer)
    except CANNOT_WORK as error:
        problems.append(f'"scheduler.params" cannot work: {reason(error)}')
