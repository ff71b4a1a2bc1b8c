"""Where the parameters of a bucket lie in it: what a kernel over a whole bucket is given, since gradients and weights
lie apart in memory while the bucket's state is flat."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from thinwire.compress.kernels.tables import KeptTables, Tables

__all__ = ["Segments"]


class Segments:
    """Runs of a flat vector, in order and without overlap: run k is `numels[k]` elements from element `firsts[k]` on.

    What no run covers is padding; `covered` counts the other elements, which end at `end`. `tables`: where a backend
    finds on its device what it tells launches of these runs.
    """

    def __init__(self, places: Iterable[tuple[int, int]]) -> None:
        """`places`: (first element, elements) of each run. Raises ValueError unless they are in order."""
        self.places = tuple((int(first), int(numel)) for first, numel in places)
        end = 0
        for first, numel in self.places:
            if first < end or numel < 0:
                raise ValueError(
                    f"{numel} elements from element {first} on follow a run that ends at {end}: give runs in order, "
                    "without overlap"
                )
            end = first + numel
        self.tables: Tables = KeptTables()
        self.end = end
        self.covered = sum(numel for _, numel in self.places)

    def __len__(self) -> int:
        return len(self.places)

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """First element and end of each run: int64 [runs, 2]."""
        firsts = np.array([first for first, _ in self.places], dtype=np.int64)
        numels = np.array([numel for _, numel in self.places], dtype=np.int64)
        return np.stack([firsts, firsts + numels], axis=1)
