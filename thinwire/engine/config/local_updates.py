"""The optimizer section of DiLoCo: options of its own, and in "inner" the section of the optimizer that each worker
steps by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import torch

from thinwire.comm import threads
from thinwire.compress.packet_layout import CodecName
from thinwire.engine.config.declined import Declined
from thinwire.engine.config.errors import CANNOT_WORK, dotted, reason, shown
from thinwire.engine.config.params import Expected, check_params
from thinwire.engine.config.trial import trial_class
from thinwire.optim import DiLoCo, registry

__all__ = ["LOCAL_UPDATES", "check_local_updates", "is_local_updates", "with_lr_inside"]

LOCAL_UPDATES = "DiLoCo"
"""The type of such a section."""

_PARAMS = "optimizer.params"
_INNER = "optimizer.params.inner"
_DEFAULT_INNER = "AdamW"
_ALONE_SECONDS = 60.0

_OPTIONS: Mapping[str, Expected] = {
    "every": Expected("int"),
    "outer_lr": Expected("float | None"),
    "outer_momentum": Expected("float"),
    "fragments": Expected("int | Literal['auto']"),
    "overlap": Expected("int | None"),
    "mix": Expected("float | None"),
    "codec": Expected(f"Literal{list(get_args(CodecName))}"),
    "block_size": Expected("int"),
    "nodes": Expected("list | Literal['auto', 'flat']"),
    "comm_backend_name": Expected("Literal['nccl', 'gloo', 'mpi']"),
}
_DECLINES = {
    "stage": Declined('it is "zero_optimization.stage", inside a worker of several ranks'),
    "elastic": Declined(
        "the engine counts steps, gives out data and names checkpoints as if its ranks stayed. Train workers that come "
        "and go in a loop of your own, with thinwire.DiLoCo(..., elastic=thinwire.Elastic(...))"
    ),
    "max_norm": Declined('use "gradient_clipping"', (0, 0.0, None)),
    "max_grad_norm": Declined('use "gradient_clipping"', (0, 0.0, None)),
    "param_dtype": Declined('use "bf16" or "fp16"'),
}
_OF_INNER = (
    "betas",
    "eps",
    "weight_decay",
    "bias_correction",
    "adam_w_mode",
    "decoupled_weight_decay",
    "amsgrad",
    "momentum",
    "nesterov",
)
"""What people write one level too high."""
# What depends on the model or on the ranks: looked at where the optimizer is built.
_NOT_ALONE = ("nodes", "fragments", "comm_backend_name")

CheckInner = Callable[[Mapping[str, Any], str], dict[str, Any]]


def is_local_updates(kind: object) -> bool:
    """Whether a section of this type is DiLoCo's, in any case."""
    return isinstance(kind, str) and kind.lower() == LOCAL_UPDATES.lower()


def check_local_updates(
    params: Mapping[str, Any], problems: list[str], check_inner: CheckInner, inner_names: Iterable[str]
) -> dict[str, Any]:
    """`params` as thinwire.DiLoCo takes them, with "inner" as `check_inner` returns it, "lr" inside.

    `check_inner`: checks the section of an optimizer, here that at the path it is given. `inner_names`: of optimizers
    that may be inside. What cannot work joins `problems`.
    """
    before = len(problems)
    params = with_lr_inside(params, problems)
    inner = params.pop("inner")
    options = _checked_options(params, problems, inner["type"] if isinstance(inner, Mapping) else _DEFAULT_INNER)
    if isinstance(inner, Mapping) and (inner := _checked_inner(inner, problems, check_inner, tuple(inner_names))):
        options["inner"] = inner
    if len(problems) == before:
        problems += _problems_alone(options)
    return options


def with_lr_inside(params: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """A copy of `params` in which "inner" is a section with a type and params of its own, among which "lr" is.

    An "inner" of another kind stays, for a problem that joins `problems`.
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


def _checked_options(params: Mapping[str, Any], problems: list[str], inner: object) -> dict[str, Any]:
    kept = {}
    for name, value in params.items():
        if name in _OF_INNER:
            problems.append(
                f'"{dotted(_PARAMS, name)}" is a parameter of the inner optimizer, {shown(inner)}: write it into '
                f'"{_INNER}.params"'
            )
        else:
            kept[name] = value
    options = check_params(_PARAMS, LOCAL_UPDATES, kept, _OPTIONS, _DECLINES, problems)
    if isinstance(options.get("fragments"), int) and options["fragments"] < 1:
        problems.append(f'"{_PARAMS}.fragments" must be at least 1, or "auto", got {options["fragments"]}')
    if isinstance(options.get("nodes"), list):
        if all(float(one).is_integer() and one >= 0 for one in options["nodes"]):
            options["nodes"] = [int(one) for one in options["nodes"]]
        else:
            problems.append(f'"{_PARAMS}.nodes" must be the number of each rank\'s node, got {shown(options["nodes"])}')
    return options


def _checked_inner(
    inner: Mapping[str, Any], problems: list[str], check_inner: CheckInner, names: tuple[str, ...]
) -> dict[str, Any] | None:
    kind = inner["type"]
    if unknown := inner.keys() - {"type", "params"}:
        problems.append(f'"{dotted(_INNER, min(map(str, unknown)))}" is not a known key: there are "type" and "params"')
        return None
    if not isinstance(kind, str):
        problems.append(f'"{_INNER}.type" must be a string, got {shown(kind)}')
        return None
    if kind.lower() in {one.lower() for one in (*registry.NAMES, LOCAL_UPDATES)}:
        problems.append(
            f'"{_INNER}.type" {shown(kind)} communicates by itself, and the inner optimizer of {LOCAL_UPDATES} steps '
            f"alone: use one of {', '.join(names)}"
        )
        return None
    own = dict(inner["params"])
    for name in sorted(own.keys() & (_OPTIONS.keys() - {"block_size"})):
        problems.append(
            f'"{dotted(_INNER, "params", name)}" is a parameter of {LOCAL_UPDATES}: write it into "{_PARAMS}"'
        )
        del own[name]
    return check_inner({"type": kind, "params": own}, _INNER)


def _problems_alone(options: Mapping[str, Any]) -> list[str]:
    """What the class says of these options, built for a parameter of one element and a job of one rank."""
    own = {name: value for name, value in options.items() if name not in (*_NOT_ALONE, "inner")}
    try:
        comm = threads.single(_ALONE_SECONDS)
        trial_class(DiLoCo)(
            [torch.nn.Parameter(torch.zeros(1))], trial_class(torch.optim.SGD), comm=comm, **own
        ).close()
    except CANNOT_WORK as error:
        return [f'"{_PARAMS}" cannot work: {reason(error)}']
    return []
