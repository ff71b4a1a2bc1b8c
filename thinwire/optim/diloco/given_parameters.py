"""The parameters that an optimizer is given, in whatever form torch takes them: as lists, and by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

__all__ = ["listed", "names_of", "tensors_in"]


def listed(params: ParamsT) -> Any:
    """`params`, which may be an iterator, as lists."""
    if isinstance(params, Tensor):
        raise TypeError("params must be parameters or groups of them, got a single tensor: put it into a list")
    given = list(params)
    if not given:
        raise ValueError("the optimizer got no parameters")
    return [
        {**one, "params": [one["params"]] if isinstance(one["params"], Tensor) else list(one["params"])}
        if isinstance(one, dict)
        else one
        for one in given
    ]


def tensors_in(given: Any) -> list[Tensor]:
    """All parameters in what an optimizer takes."""
    flat = [entry for one in given for entry in (one["params"] if isinstance(one, dict) else [one])]
    return [entry[1] if isinstance(entry, tuple) else entry for entry in flat]


def names_of(
    groups: Sequence[dict[str, Any]],
    parameters: Iterable[Tensor],
    named_parameters: Iterable[tuple[str, Tensor]] | None,
) -> list[str]:
    """What `parameters`, those of an optimizer's `groups`, are called, by whoever knows."""
    known = {id(parameter): name for name, parameter in named_parameters or ()}
    for number, group in enumerate(groups):
        given = group.get("param_names") or [f"group{number}.{place}" for place in range(len(group["params"]))]
        for parameter, name in zip(group["params"], given, strict=True):
            known.setdefault(id(parameter), name)
    return [known[id(parameter)] for parameter in parameters]
