"""The weights that all ranks have in common, whatever each of them makes of its own parameters in local steps: moved
alike on every rank, with the fp32 master weights of 16-bit ones on their owners."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from thinwire.compress.kernels.rounding import store_rounded
from thinwire.zero import Slot
from thinwire.zero.flat_bucket import FlatBucket
from thinwire.zero.master_weights import MasterWeights

__all__ = ["Change", "CommonWeights"]

Change = Callable[[int, slice, Tensor], None]
"""Changes fp32 weights, those of a run of one parameter, in place; given the parameter's number and the run's place in
the bucket."""


class CommonWeights:
    """One bucket's: the parameters themselves, until `stand_apart` gives them memory of their own, in their dtype.

    Every rank rounds its copy of 16-bit weights at random, with one seed; `publish` takes it from the owners' master
    weights again.
    """

    def __init__(self, masters: MasterWeights) -> None:
        self.bucket: FlatBucket = masters.bucket
        self.masters = masters
        self._apart: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """[padded_numel], in the parameters' dtype: those of the last sync, or the present ones."""
        return self.bucket.flat if self._apart is None else self._apart

    def stand_apart(self) -> None:
        """Keep them where they are whatever becomes of the parameters."""
        if self._apart is None:
            self._apart = self.bucket.flat.clone()

    def reset(self) -> None:
        """Go back to them, and let the parameters be them again."""
        self.show()
        self._apart = None

    def show(self) -> None:
        """Write them into the parameters."""
        if self._apart is not None:
            self.bucket.flat.copy_(self._apart)

    def adopt(self) -> None:
        """Take the parameters as they are for the common weights; master weights are the caller's."""
        if self._apart is not None:
            self._apart.copy_(self.bucket.flat)

    @torch.no_grad()
    def move(self, change: Change, parameters: Collection[int], seed: int) -> None:
        """Change those of `parameters`, the same bits on every rank; `seed` of the rounding to 16 bits."""
        if self.masters.separate:
            first = self.masters.held.start
            for run, view in zip(self.masters.runs, self.masters.views, strict=True):
                if run.parameter in parameters:
                    change(run.parameter, slice(first + run.place.start, first + run.place.stop), view)
        for number, slot in enumerate(self.bucket.layout.slots):
            if slot.parameter in parameters:
                self._move_copy(change, slot, (seed << 24) + number)

    @torch.no_grad()
    def take_over_written(self, in_sync: bool) -> list[Slot]:
        """Take over what somebody else has written into parameters; without `in_sync` the slots of those instead."""
        written = self.bucket.take_written()
        if not written or not in_sync:
            return written
        self.adopt()
        self.masters.take_over({slot.parameter for slot in written})
        return []

    def _move_copy(self, change: Change, slot: Slot, seed: int) -> None:
        place = slice(slot.offset, slot.offset + slot.numel)
        copy = self.values[place]
        weights = copy.float()
        change(slot.parameter, place, weights)
        if weights is not copy:
            store_rounded(copy, weights, seed)
