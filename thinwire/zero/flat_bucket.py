"""The parameters of one bucket in one contiguous tensor, which the model computes with: a collective then moves whole
shards without copying parameters together first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.zero.bucket_layout import BucketLayout, Slot

__all__ = ["FlatBucket", "Run"]


@dataclass(frozen=True)
class Run:
    """The part of one parameter that lies in a range of a bucket.

    `start`: its first element within the flattened parameter. `place`: where it lies within the range.
    """

    parameter: int
    start: int
    place: slice

    @property
    def numel(self) -> int:
        """How many elements it is."""
        return int(self.place.stop - self.place.start)


class FlatBucket:
    """Parameters as views of `flat`, [padded_numel] in `dtype`, and the shard of it that this rank owns.

    Construction moves the parameters: their `.data` becomes a view. `keep` says which of the values before rounding to
    `dtype` to keep in fp32 for `take_initial`: the "shard", the "whole" bucket or nothing.
    """

    def __init__(
        self,
        comm: Communicator,
        index: int,
        layout: BucketLayout,
        parameters: Sequence[Tensor],
        dtype: torch.dtype,
        keep: Literal["shard", "whole"] | None,
    ) -> None:
        self.index = index
        self.layout = layout
        self.comm = comm
        self.parameters = [parameters[slot.parameter] for slot in layout.slots]
        self._shapes = {slot: p.shape for slot, p in zip(layout.slots, self.parameters, strict=True)}
        device = self.parameters[0].device
        self.flat = torch.zeros(layout.padded_numel, dtype=dtype, device=device)
        self._initial = self._initial_values(keep) if keep else None
        for slot, parameter in zip(layout.slots, self.parameters, strict=True):
            view = self.view(self.flat, slot)
            view.copy_(parameter.detach())
            parameter.data = view
        self._versions = self._present_versions()

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters as the model sees them."""
        return self.flat.dtype

    @property
    def own_range(self) -> tuple[int, int]:
        """The elements of the bucket that this rank owns, valid ones only."""
        start = self.comm.rank * self.layout.shard
        return min(start, self.layout.numel), min(start + self.layout.shard, self.layout.numel)

    @property
    def own_shard(self) -> Tensor:
        """The shard of `flat` that belongs to this rank, a view, [shard]."""
        return self.shard_of(self.flat)

    @property
    def own_runs(self) -> list[Run]:
        """The parts of parameters in this rank's shard."""
        return self.runs(*self.own_range)

    def shard_of(self, bucket: Tensor) -> Tensor:
        """The same shard of another tensor of [padded_numel], a view."""
        return bucket[self.comm.rank * self.layout.shard :][: self.layout.shard]

    def runs(self, start: int, stop: int) -> list[Run]:
        """The parts of parameters in elements `start` to `stop` of the bucket, empty ones left out."""
        runs = []
        for slot in self.layout.slots:
            first, last = max(slot.offset, start), min(slot.offset + slot.numel, stop)
            if first < last:
                runs.append(Run(slot.parameter, first - slot.offset, slice(first - start, last - start)))
        return runs

    def view(self, bucket: Tensor, slot: Slot) -> Tensor:
        """The part of a tensor of [padded_numel] that belongs to a parameter, in the parameter's shape."""
        return bucket[slot.offset : slot.offset + slot.numel].view(self._shapes[slot])

    def shape_of(self, parameter: int) -> torch.Size:
        """The shape of the parameter with this number."""
        return next(shape for slot, shape in self._shapes.items() if slot.parameter == parameter)

    def members(self) -> list[tuple[Slot, Tensor]]:
        """The parameters with their slots."""
        return list(zip(self.layout.slots, self.parameters, strict=True))

    @torch.no_grad()
    def take_written(self) -> list[Slot]:
        """The parameters that somebody has written since the last call; what goes through `flat` does not count.

        One whose `.data` was replaced is moved into `flat` again, with its new values.
        """
        before, self._versions = self._versions, self._present_versions()
        written = []
        for (slot, parameter), earlier, now in zip(self.members(), before, self._versions, strict=True):
            view = self.view(self.flat, slot)
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter)
                parameter.data = view
                written.append(slot)
            elif earlier != now:
                written.append(slot)
        return written

    def take_initial(self) -> Tensor:
        """The values that the parameters had before they were rounded, fp32, for the masters; forgotten here."""
        assert self._initial is not None
        initial, self._initial = self._initial, None
        return initial

    def gather(self, shard: Tensor) -> Callable[[], None]:
        """Start giving every rank all owners' `shard`, [shard] in this bucket's dtype; returns what waits for it."""
        work = self.comm.all_gather(self.flat, shard, async_op=True)
        return work.wait

    def _present_versions(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    def _initial_values(self, keep: Literal["shard", "whole"]) -> Tensor:
        numel = self.layout.padded_numel if keep == "whole" else self.layout.shard
        values = torch.zeros(numel, device=self.flat.device)
        by_number = {slot.parameter: p for slot, p in zip(self.layout.slots, self.parameters, strict=True)}
        for run in self.runs(0, self.layout.numel) if keep == "whole" else self.own_runs:
            parameter = by_number[run.parameter].detach()
            values[run.place].copy_(parameter.reshape(-1)[run.start : run.start + run.numel])
        return values
