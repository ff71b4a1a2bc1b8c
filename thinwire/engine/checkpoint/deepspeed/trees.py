"""Values of a pickle as text between two processes: plain ones as JSON, tensors by their keys in a safetensors file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.checkpoint.deepspeed.stand_ins import Array, Record

__all__ = ["Unreadable", "decode", "encode"]


class Unreadable:
    """A value of a type that has no plain form: `kind` says which."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


def encode(value: Any, key_of: Callable[[Tensor], str]) -> Any:
    """`value` as JSON can hold it; `key_of` keeps a tensor and says under which key. Raises RecursionError."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return {"tensor": key_of(value)}
    if isinstance(value, Array):
        return {"tensor": key_of(value.value)}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key, key_of), encode(one, key_of)] for key, one in value.items()]}
    if isinstance(value, list | tuple | set):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode(one, key_of) for one in value]}
    if isinstance(value, Record):
        return {"record": [encode(list(value.args), key_of), encode(value.fields, key_of)]}
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
