"""The weights that all ranks have in common, whatever each of them makes of its own parameters in local steps: moved
alike on every rank, with fp32 masters of 16-bit ones on their owners."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from thinwire.compress.kernels.rounding import store_rounded
from thinwire.zero import Slot
from thinwire.zero.flat_bucket import FlatBucket, Run
from thinwire.zero.master_weights import BucketMasters

__all__ = ["Change", "CommonWeights"]

Change = Callable[[int, slice, Tensor], None]
"""Changes fp32 weights, those of a part of one parameter, in place; given the parameter's number and the part's place
in the bucket."""


class CommonWeights:
    """One bucket's: the parameters themselves, until `stand_apart` gives them memory of their own, in their dtype.

    Where 16-bit parameters have whole masters, those are the common weights, in fp32. Where masters are sharded, every
    rank rounds its 16-bit copy at random, with one seed, and `publish` takes it from the masters again.
    """

    def __init__(self, bucket: FlatBucket, masters: BucketMasters) -> None:
        self._bucket = bucket
        self._masters = masters
        self._apart: Tensor | None = None
        self._versions = self._present_versions()

    @property
    def values(self) -> Tensor:
        """[padded_numel]: those of the last sync, or the present ones; fp32 or the parameters' dtype."""
        if self._masters_are_common:
            return self._masters.weights
        return self._bucket.flat if self._apart is None else self._apart

    @property
    def rounded_masters(self) -> bool:
        """Whether the copies of masters on other ranks need `publish` now and then."""
        return self._masters.separate and not self._masters.whole

    @property
    def own_runs(self) -> list[Run]:
        """What this rank holds masters of, with places in them."""
        return self._masters.runs

    @property
    def own_masters(self) -> Tensor | None:
        """The own shard of the masters, where they are other tensors than the parameters."""
        return self.shard_of(self._masters.weights) if self._masters.separate else None

    @property
    def held(self) -> slice:
        """What this rank holds masters of, as a part of the bucket: its shard, or at stage 0 everything."""
        layout = self._bucket.layout
        if self._masters.whole:
            return slice(0, layout.padded_numel)
        first = self._bucket.comm.rank * layout.shard
        return slice(first, first + layout.shard)

    def shard_of(self, held: Tensor) -> Tensor:
        """The own shard, a view, of a tensor that is held as the masters are."""
        return self._bucket.shard_of(held) if self._masters.whole else held

    def stand_apart(self) -> None:
        """Keep them where they are whatever becomes of the parameters."""
        if not self._masters_are_common and self._apart is None:
            self._apart = self._bucket.flat.clone()

    def reset(self) -> None:
        """Go back to them, and let the parameters be them again."""
        self.show()
        self._apart = None

    def show(self) -> None:
        """Write them into the parameters."""
        if self.values is not self._bucket.flat:
            self._bucket.flat.copy_(self.values)

    def adopt(self) -> None:
        """Take the parameters as they are for the common weights; masters are the caller's."""
        if self._apart is not None:
            self._apart.copy_(self._bucket.flat)

    def publish(self) -> Callable[[], None]:
        """Start taking the parameters of every rank from the owners' masters; returns what waits for it."""
        return self._masters.publish()

    @torch.no_grad()
    def move(self, change: Change, absent: Collection[int], seed: int) -> None:
        """Change them all but the parameters in `absent`, the same bits on every rank; `seed` of the rounding to 16
        bits."""
        if self._masters.separate:
            first = self.held.start
            for run in self._masters.runs:
                if run.parameter not in absent:
                    place = slice(first + run.place.start, first + run.place.stop)
                    change(run.parameter, place, self._masters.weights[run.place])
        if not self._masters_are_common:
            for number, slot in enumerate(self._bucket.layout.slots):
                if slot.parameter not in absent:
                    self._move_copy(change, slot, (seed << 24) + number)

    @torch.no_grad()
    def take_over_written(self, in_sync: bool) -> list[Slot]:
        """Take over what somebody else has written into parameters; without `in_sync` the slots of those instead."""
        versions = self._present_versions()
        slots = self._bucket.layout.slots
        written = [slot for slot, new, old in zip(slots, versions, self._versions, strict=True) if new != old]
        self._versions = versions
        if not written or not in_sync:
            return written
        self.adopt()
        numbers = {slot.parameter for slot in written}
        for run in self._masters.runs:
            if self._masters.separate and run.parameter in numbers:
                self._masters.weights[run.place].copy_(self._bucket.flat[self.held][run.place])
        return []

    @property
    def _masters_are_common(self) -> bool:
        return self._masters.separate and self._masters.whole

    def _move_copy(self, change: Change, slot: Slot, seed: int) -> None:
        place = slice(slot.offset, slot.offset + slot.numel)
        copy = self.values[place]
        weights = copy.float()
        change(slot.parameter, place, weights)
        if weights is not copy:
            store_rounded(copy, weights, seed)

    def _present_versions(self) -> list[int]:
        # What is written through the flat bucket, as here, does not count.
        return [parameter._version for parameter in self._bucket.parameters]
