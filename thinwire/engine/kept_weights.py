"""A checkpoint that lacks parameters, read as one that holds them with the values that they have now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from thinwire.zero import SavedSlice, SliceSource
from thinwire.zero.saved_slices import OwnSlices

__all__ = ["KeptWeights"]


class KeptWeights:
    """A SliceSource that answers for `weights`, whole parameters by name, and takes all others from `found`.

    `slices`: this rank's, for their master weights.
    """

    def __init__(self, found: SliceSource, weights: Mapping[str, Tensor], slices: Iterable[SavedSlice]) -> None:
        self._found = found
        self._weights = weights
        own = [one for one in slices if one.name in weights and one.kind == "master"]
        # Values of their own: loading writes to the memory that these are views of.
        copies = [SavedSlice(one.kind, one.name, one.start, one.tensor.clone()) for one in own]
        self._own = OwnSlices(found.world_size, {}, copies, {})

    @property
    def world_size(self) -> int:
        """See SliceSource."""
        return self._found.world_size

    def counters(self) -> dict[str, Any]:
        """See SliceSource."""
        return self._found.counters()

    def kinds(self) -> set[str]:
        """See SliceSource."""
        return self._found.kinds()

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """See SliceSource."""
        if name not in self._weights:
            return self._found.read(kind, name, start, numel)
        if kind == "weight":
            return self._weights[name].reshape(-1)[start : start + numel]
        return self._own.read(kind, name, start, numel)

    def read_rank(self, key: str, rank: int) -> Tensor:
        """See SliceSource."""
        return self._found.read_rank(key, rank)
