"""What a checkpoint of sharded state is made of: runs of one parameter's values under the parameter's own name, so
that any number of ranks, and any stage, can take up what another saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["OwnSlices", "SavedSlice", "SliceSource"]


@dataclass(frozen=True)
class SavedSlice:
    """Elements `start` to `start + tensor.numel()` of the flattened parameter `name`, in one of its roles.

    `kind` is the role: "weight", "master", "exp_avg", ... Kinds that begin with "scalar." hold one value a parameter.
    `tensor` is one-dimensional and contiguous.
    """

    kind: str
    name: str
    start: int
    tensor: Tensor


class SliceSource(Protocol):
    """What somebody saved, to be read in whatever runs the reader needs."""

    @property
    def world_size(self) -> int:
        """Ranks of the job that saved."""

    def counters(self) -> dict[str, Any]:
        """What the optimizer's `counters` returned."""

    def kinds(self) -> set[str]:
        """The roles that any parameter has values for."""

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """These values, one-dimensional on the CPU; KeyError where nobody saved them."""

    def read_rank(self, key: str, rank: int) -> Tensor:
        """`rank_tensors()[key]` of that rank of the saving job; KeyError where there is none."""


class OwnSlices:
    """The slices of one rank as a source for the same rank of a job of the same size."""

    def __init__(
        self, world_size: int, counters: dict[str, Any], slices: Iterable[SavedSlice], rank_tensors: dict[str, Tensor]
    ) -> None:
        self.world_size = world_size
        self._counters = counters
        self._rank_tensors = rank_tensors
        self._slices: dict[tuple[str, str], list[SavedSlice]] = {}
        for saved in slices:
            self._slices.setdefault((saved.kind, saved.name), []).append(saved)

    def counters(self) -> dict[str, Any]:
        """See SliceSource."""
        return self._counters

    def kinds(self) -> set[str]:
        """See SliceSource."""
        return {kind for kind, _ in self._slices}

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """See SliceSource."""
        if not numel:  # of an empty parameter nobody saves a slice
            return torch.empty(0)
        found: list[Tensor] = []
        at, end = start, start + numel
        for saved in sorted(self._slices.get((kind, name), []), key=lambda one: one.start):
            if saved.start <= at < min(end, saved.start + saved.tensor.numel()):
                found.append(saved.tensor[at - saved.start : end - saved.start].cpu())
                at += found[-1].numel()
        if at < end:
            raise KeyError(f"elements {start} to {end} of {kind} of {name} are not in this rank's state")
        return found[0] if len(found) == 1 else torch.cat(found)

    def read_rank(self, key: str, rank: int) -> Tensor:
        """See SliceSource."""
        del rank  # there is only this one's
        return self._rank_tensors[key].cpu()
