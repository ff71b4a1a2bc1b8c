"""What a training job hands over to be saved, checked where it is handed over."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.checkpoint.tensor_file import CODES, dtype_from_name, dtype_name
from thinwire.zero import SavedSlice

__all__ = ["ModelDescription", "Snapshot", "values_of_kind"]

_SCALAR = "scalar."


@dataclass(frozen=True)
class ModelDescription:
    """Shape and dtype of every parameter, in the model's order."""

    parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    @classmethod
    def of(cls, named_parameters: Iterable[tuple[str, Tensor]]) -> ModelDescription:
        """The description of `model.named_parameters()`."""
        return cls({name: (tuple(parameter.shape), parameter.dtype) for name, parameter in named_parameters})

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ModelDescription:
        """The inverse of `to_json`."""
        return cls(
            {name: (tuple(map(int, one["shape"])), dtype_from_name(one["dtype"])) for name, one in value.items()}
        )

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            name: {"shape": list(shape), "dtype": dtype_name(dtype)} for name, (shape, dtype) in self.parameters.items()
        }

    def numel(self, name: str) -> int:
        """Elements of one parameter."""
        return math.prod(self.parameters[name][0])

    def difference_to(self, saved: ModelDescription) -> str | None:
        """The first parameter that a checkpoint of `saved` cannot fill, or None where all agree."""
        for name, mine in self.parameters.items():
            theirs = saved.parameters.get(name)
            if theirs is None:
                return f"parameter {name!r}, {_in_words(mine)}, is not in it"
            if mine != theirs:
                return f"parameter {name!r} is {_in_words(theirs)} in it and {_in_words(mine)} in this model"
        for name, theirs in saved.parameters.items():
            if name not in self.parameters:
                return f"parameter {name!r}, {_in_words(theirs)}, is in it and not in this model"
        return None


@dataclass(frozen=True)
class Snapshot:
    """Everything that one rank contributes to a checkpoint.

    Args:
        slices: this rank's share; the ranks' slices of a kind hold each of its parameters once, and every parameter has
            a "weight" or a "master". Parameters that no optimizer holds are slices of one rank as well.
        rank_tensors: what belongs to this rank alone, any shape.
        shared: JSON values that are the same everywhere; rank 0's are written. "optimizer" holds what SliceSource's
            `counters` gives back, "tied" maps other names of a parameter to the one in `model`.
        rank_values: JSON values of this rank.
        buffers: the model's; rank 0's are written.
        model: the same on every rank.
    """

    slices: list[SavedSlice]
    model: ModelDescription
    rank_tensors: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    rank_values: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ValueError or TypeError for what could not be read back."""
        for one in self.slices:
            self._check_slice(one)
        places = {(one.kind, one.name, one.start) for one in self.slices}
        if len(places) < len(self.slices):
            raise ValueError(f"{len(self.slices)} slices begin at {len(places)} places: give each run of values once")
        for key, tensor in (*self.rank_tensors.items(), *self.buffers.items()):
            _check_dtype(key, tensor)
        for name, values in (("shared", self.shared), ("rank_values", self.rank_values)):
            try:
                json.dumps(values)
            except (TypeError, ValueError) as error:
                raise TypeError(f"{name} must hold what JSON can write: {error}") from error

    def copied_to_cpu(self) -> Snapshot:
        """The same with tensors of its own, which training does not change."""
        return replace(
            self,
            slices=[replace(one, tensor=_copied(one.tensor)) for one in self.slices],
            rank_tensors={key: _copied(tensor) for key, tensor in self.rank_tensors.items()},
            buffers={name: _copied(tensor) for name, tensor in self.buffers.items()},
            shared=json.loads(json.dumps(self.shared)),
            rank_values=json.loads(json.dumps(self.rank_values)),
        )

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [*(one.tensor for one in self.slices), *self.rank_tensors.values(), *self.buffers.values()]

    def _check_slice(self, one: SavedSlice) -> None:
        what = f"slice {one.kind!r} of {one.name!r} at {one.start}"
        _check_dtype(what, one.tensor)
        if not one.kind or "/" in one.kind:
            raise ValueError(f"{what}: a kind is a word without '/'")
        if one.name not in self.model.parameters:
            raise ValueError(f"{what}: the model has no parameter of that name")
        if one.tensor.dim() != 1 or not one.tensor.is_contiguous():
            shape = tuple(one.tensor.shape)
            raise ValueError(f"{what} must be one-dimensional and contiguous, got shape {shape}: give a flat view")
        end, whole = one.start + one.tensor.numel(), values_of_kind(self.model, one.kind, one.name)
        if not 0 <= one.start <= end <= whole:
            raise ValueError(f"{what} ends at {end}, but there are {whole} values")


def values_of_kind(model: ModelDescription, kind: str, name: str) -> int:
    """How many values the slices of a kind hold together for one parameter."""
    return 1 if kind.startswith(_SCALAR) else model.numel(name)


def _check_dtype(what: str, tensor: Tensor) -> None:
    if tensor.dtype not in CODES:
        known = ", ".join(map(dtype_name, CODES))
        raise TypeError(
            f"{what} is {dtype_name(tensor.dtype)}, which a checkpoint cannot hold; expected one of {known}"
        )


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _in_words(parameter: tuple[tuple[int, ...], torch.dtype]) -> str:
    shape, dtype = parameter
    return f"{dtype_name(dtype)} of shape {shape}"
