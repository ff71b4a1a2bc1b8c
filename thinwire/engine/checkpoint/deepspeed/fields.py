"""Takes values out of DeepSpeed's dictionaries: one that is missing, or of another type, is an error that names it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from thinwire.engine.checkpoint.deepspeed.stand_ins import Record
from thinwire.engine.checkpoint.errors import CheckpointError

__all__ = ["Entry", "flat_tensor", "number_of", "shape_of"]

Kind = TypeVar("Kind")

_NO_LENGTH = 1 << 62


class Entry:
    """A dictionary of the file `path`, at `place` in it."""

    def __init__(self, path: Path, values: Any, place: str = "") -> None:
        self.path = path
        self._place = place
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{self.where('')} is {type(values).__name__}, a dictionary was expected")
        self.values = values

    def where(self, key: object) -> str:
        """How messages call a value in here."""
        parts = [part for part in (self._place, str(key)) if part]
        return f"{'.'.join(parts)} in {self.path}" if parts else f"{self.path}"

    def take(self, key: object, kind: type[Kind] | tuple[type[Kind], ...]) -> Kind:
        """The value under `key`, which must be there and of this type."""
        if key not in self.values:
            raise CheckpointError(f"{self.path} holds no {self._named(key)}: it is of another version, or not whole")
        value = self.values[key]
        if not isinstance(value, kind):
            names = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
            raise CheckpointError(f"{self.where(key)} is {type(value).__name__}, {names} was expected")
        return value

    def below(self, key: object) -> Entry:
        """The dictionary under `key`."""
        if key not in self.values:
            raise CheckpointError(f"{self.path} holds no {self._named(key)}: it is of another version, or not whole")
        return Entry(self.path, self.values[key], self._named(key))

    def get(self, key: object, default: Any = None) -> Any:
        """The value under `key`, whatever it is."""
        return self.values.get(key, default)

    def _named(self, key: object) -> str:
        return f"{self._place}.{key}" if self._place else str(key)


def shape_of(value: Any, where: str) -> tuple[int, ...]:
    """A torch.Size, or a sequence of whole numbers, as a shape."""
    if not isinstance(value, Sequence) or not all(type(one) is int and one >= 0 for one in value):
        raise CheckpointError(f"{where} is no shape")
    if math.prod(value) > _NO_LENGTH:
        raise CheckpointError(f"{where} is a shape of more elements than there can be")
    return tuple(value)


def flat_tensor(value: Any, where: str) -> Tensor:
    """A one-dimensional floating-point tensor."""
    if not isinstance(value, Tensor) or value.dim() != 1 or not value.is_floating_point():
        raise CheckpointError(f"{where} is no one-dimensional floating-point tensor")
    return value


def number_of(value: Any, where: str) -> float:
    """A number, a tensor of one, or the number that an enumeration's member stands for."""
    if isinstance(value, Record) and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{where} is no number")
    return value
