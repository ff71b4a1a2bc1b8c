"""Values of a pickle as text between two processes: plain ones as JSON, tensors by their keys in a safetensors file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.checkpoint.deepspeed.stand_ins import Array, Record

__all__ = ["Unreadable", "decode", "encode"]

_DEEPEST = 100


class Unreadable:
    """A value of a type that has no plain form: `kind` says which."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


def encode(value: Any, key_of: Callable[[Tensor], str], depth: int = 0) -> Any:
    """`value` as JSON can hold it; `key_of` keeps a tensor and says under which key. Raises ValueError for a value that
    is nested too deep for the reader."""
    if depth > _DEEPEST:
        raise ValueError(f"its values are nested more than {_DEEPEST} deep")

    def inner(one: Any) -> Any:
        return encode(one, key_of, depth + 1)

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return {"tensor": key_of(value)}
    if isinstance(value, Array):
        return {"tensor": key_of(value.value)}
    if isinstance(value, Mapping):
        return {"dict": [[inner(key), inner(one)] for key, one in value.items()]}
    if isinstance(value, list | tuple | set):
        return {"tuple" if isinstance(value, tuple) else "list": [inner(one) for one in value]}
    if isinstance(value, Record):
        return {"record": [inner(list(value.args)), inner(value.fields)]}
    return {"unreadable": str(value) if isinstance(value, torch.dtype) else type(value).__name__}


def decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `encode`; what was the same tensor there is the same here."""
    if not isinstance(tree, dict):
        return tree
    ((kind, inner),) = tree.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {decode(key, tensors): decode(one, tensors) for key, one in inner}
    if kind == "record":
        record = Record(*decode(inner[0], tensors))
        record.fields = decode(inner[1], tensors)
        return record
    if kind == "unreadable":
        return Unreadable(inner)
    values = [decode(one, tensors) for one in inner]
    return tuple(values) if kind == "tuple" else values
