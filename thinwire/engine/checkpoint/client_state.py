"""What users put beside a checkpoint has to come back as it was, which JSON promises for few types: checked before
anything is written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["check_client_state"]


def check_client_state(state: Any) -> None:
    """Raise TypeError, naming the key, for what JSON cannot hold: tensors, objects, NaN, keys that are no strings."""
    if not isinstance(state, Mapping):
        raise TypeError(f"client_state must be a dict, got {type(state).__name__}")
    _check(state, "client_state")


def _check(value: Any, path: str) -> None:
    if isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path} has the key {key!r}: keys must be strings, since checkpoints keep it as JSON")
            _check(one, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            _check(one, f"{path}[{index}]")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(
            f"{path} is a {type(value).__name__}, which a checkpoint cannot keep: give numbers, strings, lists and "
            "dicts, for example tensor.tolist()"
        )
    elif isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"{path} is {value}, which JSON cannot hold: leave it out, or give None")
