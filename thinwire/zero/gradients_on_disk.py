"""Averaged gradients that wait for the step in files of a disk, beside the state that they step."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm.agreement import NodeLinks
from thinwire.zero.disk import Disk, SwapFile
from thinwire.zero.gradient_seal import Seal
from thinwire.zero.gradients import BucketGradients
from thinwire.zero.master_weights import FlatBucket
from thinwire.zero.placement import Sharding

_PIECE_BYTES = 12 << 20  # as much as a piece of Adam's state, whose buffers they share


class GradientsOnDisk(BucketGradients):
    """The same at stage 2, with averages in files of `disk` from the moment that they are there.

    Their norm is taken before. What a file has against it is in the ring's `error`, but where averages are asked for.
    """

    def __init__(
        self,
        bucket: FlatBucket,
        sharding: Sharding,
        seal: Seal,
        links: NodeLinks | None,
        spare: list[Tensor],
        disk: Disk,
        name: str,
    ) -> None:
        super().__init__(bucket, sharding, seal, links, spare)
        self._disk, self._norm, self._shard = disk, torch.zeros(()), None
        width, shard = self.accumulated_dtype.itemsize, bucket.layout.shard
        starts = range(0, shard, max(1, _PIECE_BYTES // width))
        self._cuts = [slice(start, min(start + starts.step, shard)) for start in starts]
        plan = partial(disk.plan, f"{name}-gradient")
        self.files: list[SwapFile] = [plan((cut.stop - cut.start) * width) for cut in self._cuts]

    @property
    @override
    def average(self) -> Tensor:
        """In memory from now on, as it may be written to. Raises SwapFileError."""
        if self._shard is None:
            self._shard = self._read().to(self.bucket.flat.device)
        return self._shard

    @property
    @override
    def voted_on(self) -> Tensor:
        return self._norm if self._shard is None else self._shard

    @override
    def take_average(self) -> Tensor | None:
        if self._shard is not None:
            return self._shard
        with self._disk.ring.noting_errors():
            return self._read()
        return None

    @override
    def start(self) -> None:
        if self.filled:
            self._disk.ring.expect(self.files)  # to be added to
        super().start()

    @override
    def end_step(self) -> None:
        super().end_step()
        self._shard = None

    @override
    def _keep_in_shard(self, average: Tensor, add: bool) -> None:
        ring = self._disk.ring
        with ring.noting_errors():
            if add and self._shard is None:
                self._shard = self._read().to(average.device)
            super()._keep_in_shard(average, add)
            assert self._shard is not None
            self._norm = torch.linalg.vector_norm(self._shard, dtype=torch.float32)
            for file, cut in zip(self.files, self._cuts, strict=True):
                values = self._shard[cut]
                buffer = ring.blank(file)
                buffer.values[: values.nbytes].view(values.dtype).copy_(values)
                ring.give_back(file, buffer, values.nbytes)
        self._shard = None

    def _read(self) -> Tensor:
        values = torch.empty(self.bucket.layout.shard, dtype=self.accumulated_dtype)
        for file, cut in zip(self.files, self._cuts, strict=True):
            buffer = self._disk.ring.take(file)
            values[cut] = buffer.values[: values[cut].nbytes].view(values.dtype)
            self._disk.ring.give_back(file, buffer, None)
        return values
