"""Transports of buckets' gradients, and the one that averages them exactly, in memory or beside state on a disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import Work
from thinwire.comm.agreement import NodeLinks
from thinwire.zero.bucket_layout import BucketLayout, Slot
from thinwire.zero.disk import Disk, SwapFile
from thinwire.zero.gradient_seal import Seal
from thinwire.zero.master_weights import FlatBucket, ShardedParameters
from thinwire.zero.placement import Sharding

_PIECE_BYTES = 12 << 20  # of a file, as much as a piece of Adam's state, whose buffers they share


class BucketTransport(Protocol):
    """What sends one bucket's gradients."""

    @property
    def layout(self) -> BucketLayout:
        """The bucket's parameters."""

    def keep(self, slot: Slot, parameter: Tensor) -> None:
        """Note a gradient that a later backward will add to, before it is taken."""

    def take(self, slot: Slot, parameter: Tensor) -> None:
        """Take a parameter's gradient, to be sent."""

    def leave_out(self, slot: Slot, expected: bool) -> None:
        """Note that a parameter has no gradient on this rank; `expected`: nor on any other."""

    @property
    def overwrites_gradients(self) -> bool:
        """Whether `.grad` is not the gradient any more once it has been averaged."""

    @property
    def may_stay(self) -> bool:
        """Whether `stay` can take the place of a transfer of zeros; the same on every rank."""

    def stay(self) -> None:
        """Note that no rank has a gradient for any of the parameters: nothing will be sent."""

    def start(self) -> None:
        """Start leg 1."""

    def advance(self) -> None:
        """Wait for leg 1, combine what it brought, and start leg 2."""

    def wait(self) -> None:
        """Wait for leg 2."""

    def end_step(self) -> None:
        """Forget what this step brought."""


class BucketGradients:
    """The gradients of one bucket's parameters, in the dtype in which they add up.

    Leg 1 sends every owner its shard, an all-to-all; the owner sums in rank order, in fp32, so that every stage and
    every backend gets the same bits. Leg 2, at stage 0 only, gives the averages back to all. With `links`, at stages 1
    and 2, nodes' sums leave, in fp32 or the `wire_dtype`.

    Stages 0 and 1 keep `.grad` of every parameter as a view of one flat tensor; stage 2 frees each bucket once it has
    left, in the parameters' dtype, and adds what further backwards bring to its shard. `sharding.averaging` says in
    which dtype gradients add up and travel, and by what they are divided first.

    `spare`: memory of all buckets, passed on until the step ends, on CPUs, where new pages cost more than what is done
    with them. `filled`: whether this step has brought an average. `accumulated_dtype`: in which gradients add up.
    `seal`: of `.grad`, in which averages arrive at stage 0.
    """

    may_stay = True
    files: Sequence[SwapFile] = ()
    """Where a disk has the averages."""
    then: Callable[[Tensor], None] | None = None
    """Called at stages 1 and 2 with this rank's averages, of all backwards so far, where a disk has their state."""

    def __init__(
        self,
        bucket: FlatBucket,
        sharding: Sharding,
        seal: Seal,
        links: NodeLinks | None,
        spare: list[Tensor],
    ) -> None:
        stage, averaging = sharding.stage, sharding.averaging
        self.bucket = bucket
        self.stage = stage
        self.overwrites_gradients = stage == 1  # on the owner
        self._links = links
        self._comm = bucket.comm if links is None or links.between is None else links.between
        self.accumulated_dtype = averaging.accumulated(bucket.dtype)
        self._flat_dtype = bucket.dtype if stage == 2 else self.accumulated_dtype
        self._wire_dtype = averaging.wire_dtype or (self._flat_dtype if links is None else torch.float32)
        self._divide_first = averaging.divide_first
        self._seal, self._spare = seal, spare
        self._flat: Tensor | None = None
        self._shard = self._new_shard() if stage == 2 else None
        self.filled = False
        self.layout = bucket.layout
        self._leg_1: tuple[Tensor, Tensor, Work] | None = None
        self._leg_2: tuple[Tensor, Tensor, Work] | None = None

    @property
    def average(self) -> Tensor:
        """The averaged gradient, after `wait`: the whole bucket at stage 0, else this rank's shard."""
        if self.stage == 2:
            assert self._shard is not None
            return self._shard
        assert self._flat is not None, "average follows wait()"
        return self._flat if self.stage == 0 else self.bucket.shard_of(self._flat)

    @property
    def voted_on(self) -> Tensor:
        """The averages of this rank's shard, or their 2-norm, 0-dimensional."""
        return self.bucket.shard_of(self.average) if self.stage == 0 else self.average

    def take_average(self) -> Tensor | None:
        """The average, which only this step needs; None where a disk has lost it."""
        return self.average

    def keep(self, slot: Slot, parameter: Tensor) -> None:
        """Let further backwards add to the gradient in the bucket's own memory."""
        self.take(slot, parameter)

    def take(self, slot: Slot, parameter: Tensor) -> None:
        """Move a parameter's gradient into the bucket; at stages 0 and 1 `.grad` becomes a view of it."""
        gradient = parameter.grad
        assert gradient is not None
        view = self.bucket.view(self._whole(), slot)
        if gradient.data_ptr() != view.data_ptr() or gradient.numel() == 0:
            view.copy_(gradient)
        # `.data` has a count of versions of its own: of what others write, not of what goes through the bucket.
        parameter.grad = None if self.stage == 2 else view.data

    def stay(self) -> None:
        """No rank has a gradient for this bucket: send nothing, and keep what earlier backwards brought."""

    def leave_out(self, slot: Slot, expected: bool) -> None:
        """Count a parameter that has no gradient on this rank as zero; `expected`: nor on any other."""
        self.bucket.view(self._whole(), slot).zero_()

    def start(self) -> None:
        """Leg 1: send every owner its shard."""
        whole = self._whole()
        for gap in self.bucket.layout.gaps:
            whole[gap].zero_()
        sent = whole if self._divide_first == 1.0 else torch.div(whole, self._divide_first)
        if self._links is not None:
            sent = self._links.add_up(sent)
        sent = sent.to(self._wire_dtype)
        received = self._memory(sent, sent.dtype)
        work = self._comm.all_to_all(received, sent, async_op=True)
        self._leg_1 = (sent, received, work)

    def advance(self) -> None:
        """Average what leg 1 brought; at stage 0 start leg 2."""
        assert self._leg_1 is not None, "advance() follows start()"
        _, received, work = self._leg_1
        work.wait()
        self._leg_1 = None
        adds, self.filled = self.filled and self.stage == 2, True
        whole = self._whole()
        kept = self._shard if self.stage == 2 else self.bucket.shard_of(whole)
        narrower = self.stage == 0 and self._wire_dtype.itemsize < whole.dtype.itemsize
        into = None if adds or narrower or kept is None or kept.dtype != torch.float32 else kept
        rows = received.view(self._comm.size, -1)
        total = rows[0].float() if self.stage == 0 or rows.dtype == torch.float32 else self._fp32(rows[0])
        average = _mean(total, rows[1:], self._divide_first, into)
        if self.stage == 0:
            average = average.to(self._wire_dtype if narrower else whole.dtype)
            gathered = torch.empty_like(whole, dtype=average.dtype) if narrower else whole
            self._seal.expect_averages([slot.parameter for slot in self.layout.slots])
            self._leg_2 = (average, gathered, self._comm.all_gather(gathered, average, async_op=True))
        elif self.stage == 2:
            self._keep_in_shard(average, adds)
        elif into is None:
            self.bucket.shard_of(whole).copy_(average)
        if self.stage == 2:
            self._flat = None
        elif self.stage and self.then is not None:
            self.then(self.average)
        if self.stage and received.device.type == "cpu":
            self._spare += [received, whole][: self.stage] + ([total] if total.dtype != rows.dtype else [])

    def wait(self) -> None:
        """Wait for leg 2, where there is one."""
        if self._leg_2 is not None:
            _, gathered, work = self._leg_2
            work.wait()
            self._leg_2 = None
            if gathered is not self._flat:
                self._whole().copy_(gathered)
            self._seal.averages_are_there([slot.parameter for slot in self.layout.slots])

    def end_step(self) -> None:
        """Forget the averages; the next backward starts new ones."""
        self.filled = False
        self._spare.clear()

    def release(self) -> None:
        """Give back the memory: gradients go another way from now on."""
        self._flat = self._shard = None
        self.filled = False

    def _keep_in_shard(self, average: Tensor, add: bool) -> None:
        if self._shard is None:  # after `release`, where a warmup begins anew
            self._shard = self._new_shard()
        if add:
            self._shard.add_(average)
        elif average is not self._shard:
            self._shard.copy_(average)

    def _whole(self) -> Tensor:
        if self._flat is None:
            new = self._memory if self.stage == 2 else torch.empty_like
            self._flat = new(self.bucket.flat, dtype=self._flat_dtype)
        return self._flat

    def _memory(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor as flat as `like`, until it is given to `spare`: bytes of numpy's, which Linux gives large pages.
        Thousands of small ones, as torch's, take four times as long."""
        if like.device.type != "cpu":
            return torch.empty_like(like, dtype=dtype)
        for number, one in enumerate(self._spare):
            if one.dtype == dtype and one.numel() >= like.numel():
                return self._spare.pop(number)[: like.numel()]
        del self._spare[:1]  # too small: no more is held than is on its way at once
        nbytes = like.numel() * dtype.itemsize
        memory = torch.from_numpy(np.empty(nbytes + 64, np.uint8))
        return memory[-memory.data_ptr() % 64 :][:nbytes].view(dtype)  # aligned as torch's

    def _fp32(self, values: Tensor) -> Tensor:
        return self._memory(values, torch.float32).copy_(values)

    def _new_shard(self) -> Tensor:
        return torch.empty_like(self.bucket.shard_of(self.bucket.flat), dtype=self.accumulated_dtype)


class GradientsOnDisk(BucketGradients):
    """The same at stage 2, with averages in files of `disk` from the moment that they are there.

    Their norm is taken before. What a file has against it is in the ring's `error`, but where averages are asked for.
    """

    def __init__(
        self,
        bucket: FlatBucket,
        name: str,
        sharding: Sharding,
        seal: Seal,
        links: NodeLinks | None,
        spare: list[Tensor],
        disk: Disk,
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
            exact = average.copy_(self._shard)
            self._norm = torch.linalg.vector_norm(exact)
            for file, cut in zip(self.files, self._cuts, strict=True):
                values = self._shard[cut]
                buffer = ring.blank(file)
                buffer.values[: values.nbytes].view(values.dtype).copy_(values)
                ring.give_back(file, buffer, values.nbytes)
            if self.then is not None:
                self.then(exact)
            if exact.device.type == "cpu":
                self._spare.append(self._shard)
        self._shard = None

    @override
    def _new_shard(self) -> Tensor:
        return self._memory(self.bucket.shard_of(self.bucket.flat), self.accumulated_dtype)

    def _read(self) -> Tensor:
        values = torch.empty(self.bucket.layout.shard, dtype=self.accumulated_dtype)
        for file, cut in zip(self.files, self._cuts, strict=True):
            buffer = self._disk.ring.take(file)
            values[cut] = buffer.values[: values[cut].nbytes].view(values.dtype)
            self._disk.ring.give_back(file, buffer, None)
        return values


def averaging_gradients(parameters: ShardedParameters, seal: Seal, disk: Disk | None = None) -> list[BucketGradients]:
    """What averages every bucket's gradients exactly, each rank keeping what the stage keeps, or a disk."""
    spare: list[Tensor] = []
    given = parameters.sharding, seal, parameters.links, spare
    if disk is None:
        return [BucketGradients(one, *given) for one in parameters.buckets]
    names = [parameters.names[one.layout.slots[0].parameter] for one in parameters.buckets]
    named = zip(parameters.buckets, names, strict=True)
    return [GradientsOnDisk(bucket, name, *given, disk) for bucket, name in named]


def _mean(total: Tensor, others: Tensor, divided_by: float, into: Tensor | None) -> Tensor:
    """The mean of fp32 `total`, [shard], and the rows `others`, [ranks - 1, shard], which were `divided_by` before and
    are used up, summed in rank order: fp32 [shard], in the place of `total` or `into` another."""
    for row in others:
        total.add_(row)
    into = total if into is None else into
    if len(others):
        return torch.div(total, (len(others) + 1) / divided_by, out=into)
    return total if into is total and divided_by == 1.0 else torch.mul(total, divided_by, out=into)
