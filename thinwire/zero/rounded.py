"""Rounding in a sharded step: gradients go through a codec to their owners, with error feedback, and new weights come
back as differences against what every rank holds, so that replicas have the same bits.

    rank i   c_i = C(g_i + e_i),  e_i += g_i - c_i              leg 1, to the owner of the shard
    owner    w by the optimizer, of the mean of c;  q = D(w - r)    leg 2, to every rank
    all      r += q

w are the owner's master weights and r the replica, the model's parameters. What D loses needs no memory of its own: it
is by how much w is ahead of r, which the next difference holds again (SDP4Bit, arXiv 2410.15526). At stage 0 every rank
steps all weights: there leg 2 brings the average itself through C, with the owner's residual, as Exchange has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.compress.codecs import make_codec
from thinwire.compress.exchange import Exchange, bring_headers
from thinwire.compress.hierarchical_exchange import HierarchicalExchange, make_exchange
from thinwire.compress.kernels.loading import prepare_kernels, wait_for_kernels
from thinwire.compress.light_exchanges import ExchangeFromOwners, ExchangeToOwners
from thinwire.zero.bucket_layout import Slot
from thinwire.zero.gradient_seal import Seal
from thinwire.zero.gradients import BucketGradients
from thinwire.zero.master_weights import FlatBucket, ShardedParameters, runs_in
from thinwire.zero.placement import Sharding
from thinwire.zero.rank_state import warn_of_lost_residuals
from thinwire.zero.saved_state import (
    AVERAGE_RESIDUAL,
    DamagedStateError,
    SavedSlice,
    SliceSource,
    mean_over_ranks,
    ranks_of_residuals,
)

_WORTH_TRIMMING = 0.98
"""Of a bucket's elements: where more belong to parameters, padding goes along, as it takes less than it does to part it
from them."""

_OF_RANK = "gradient_residual"
"""What checkpoints call the residuals of leg 1."""


class RoundedGradients(BucketGradients):
    """The gradients of one bucket's parameters, which leave once a step, through `exchange`, with error feedback.

    `commit` takes the new residuals over; without it, as in a step that is skipped, they stay as they were. They are
    times `loss_scale`, as the gradients that they are added to; of a scale that a GradScaler tells only with the step,
    residuals make good then for having been added with the one before. At stages 1 and 2 gradients are given back as
    they are taken.
    """

    def __init__(
        self, bucket: FlatBucket, sharding: Sharding, seal: Seal, exchange: Exchange, loss_scale: Callable[[], float]
    ) -> None:
        super().__init__(bucket, sharding, seal, None, [])
        self._shard = None
        self.overwrites_gradients = False
        self.exchange = exchange
        exchange.keeps_payload = bucket.flat.device.type == "cpu"  # where new pages take longer than a codec does
        self._loss_scale, self._scale = loss_scale, 1.0
        self._starts = 0

    @property
    @override
    def average(self) -> Tensor:
        if isinstance(self.exchange, ExchangeToOwners):
            return self.exchange.average_of_own
        return super().average

    @override
    def keep(self, slot: Slot, parameter: Tensor) -> None:
        if self.stage == 0:
            super().keep(slot, parameter)

    @override
    def take(self, slot: Slot, parameter: Tensor) -> None:
        if self.stage == 0:
            super().take(slot, parameter)
            return
        gradient = parameter.grad
        assert gradient is not None
        self.bucket.view(self.exchange.payload, slot).copy_(gradient)
        parameter.grad = None

    @override
    def leave_out(self, slot: Slot, expected: bool) -> None:
        self.bucket.view(self._whole() if self.stage == 0 else self.exchange.payload, slot).zero_()

    @override
    def start(self) -> None:
        if self.stage == 0:
            self.exchange.payload.copy_(self._whole())
        self._clear_gaps(self.exchange.payload)
        self._scale_residuals(self._loss_scale())
        self._starts += 1
        self.exchange.start(self._starts)

    @override
    def advance(self) -> None:
        self.exchange.advance()
        self.filled = True
        if self.stage == 0:
            self._seal.expect_averages([slot.parameter for slot in self.layout.slots])

    @override
    def wait(self) -> None:
        if self.filled:
            self.exchange.wait()
        if self.filled and self.stage == 0:
            whole = self._whole()
            if whole.dtype == torch.float32:
                self.exchange.read(whole)
            else:
                average = torch.empty_like(whole, dtype=torch.float32)
                self.exchange.read(average)
                whole.copy_(average)
            self._seal.averages_are_there([slot.parameter for slot in self.layout.slots])

    def gathering_bytes(self) -> int:
        """Bytes of what gradients gather in, add up in inside a node and are averaged in, between steps."""
        held = self.average.nbytes if self.stage else self.layout.padded_numel * self.accumulated_dtype.itemsize
        if self.exchange.keeps_payload:
            held += self.exchange.payload.nbytes
            if isinstance(self.exchange, HierarchicalExchange) and self.exchange.worker_residual is not None:
                held += self.exchange.worker_residual.nbytes
        return held

    def commit(self) -> None:
        """Take over the residuals of a step that is applied."""
        if not self.filled:
            return
        before = self.exchange.worker_residual, self.exchange.owner_residual
        self.exchange.commit()
        factor, self._scale = self._loss_scale() / self._scale, self._loss_scale()
        for old, new in zip(before, (self.exchange.worker_residual, self.exchange.owner_residual), strict=True):
            if factor != 1.0 and old is not None and new is not None:
                new.add_(old, alpha=factor - 1)
        assert self.exchange.worker_residual is not None
        self._clear_gaps(self.exchange.worker_residual, self.exchange.worker_place.start)

    def _clear_gaps(self, values: Tensor, first: int = 0) -> None:
        """Zero what lies between owners' parameters, whose blocks reach into it; `values` are from `first` on."""
        for gap in self.layout.gaps:
            values[max(gap.start - first, 0) : max(gap.stop - first, 0)].zero_()

    def _scale_residuals(self, scale: float) -> None:
        factor, self._scale = scale / self._scale, scale
        for residual in (self.exchange.worker_residual, self.exchange.owner_residual):
            if residual is not None and factor != 1.0:
                residual.mul_(factor)

    # Checkpoints: residuals of plain gradients; scales are powers of 2, so that nothing is lost

    def rank_tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The residuals of leg 1, by parameter."""
        self._scale_residuals(1.0)
        residual = self.exchange.worker_residual
        assert residual is not None
        runs = runs_in(self.layout, self.exchange.worker_place)
        return {f"{_OF_RANK}.{names[run.parameter]}": residual[run.place] for run in runs}

    def saved_slices(self, names: Sequence[str]) -> list[SavedSlice]:
        """The residual of leg 2, of an owner."""
        self._scale_residuals(1.0)
        residual = self.exchange.owner_residual
        runs = () if residual is None else runs_in(self.layout, self.exchange.owner_place)
        return [SavedSlice(AVERAGE_RESIDUAL, names[run.parameter], run.start, residual[run.place]) for run in runs]  # type: ignore[index]

    def load(self, source: SliceSource, names: Sequence[str], ranks: Sequence[int]) -> None:
        """Take over the mean of the residuals of these `ranks`, by which the next average is what it would have been,
        and the owner's, zeros if it was saved at another stage."""
        worker, owner = self.exchange.worker_residual, self.exchange.owner_residual
        assert worker is not None
        for run in runs_in(self.layout, self.exchange.worker_place):
            worker[run.place].copy_(mean_over_ranks(source, f"{_OF_RANK}.{names[run.parameter]}", ranks))
        if owner is not None and AVERAGE_RESIDUAL in source.kinds():
            for run in runs_in(self.layout, self.exchange.owner_place):
                owner[run.place].copy_(source.read(AVERAGE_RESIDUAL, names[run.parameter], run.start, run.numel))

    def reset(self) -> None:
        """Forget the residuals."""
        self._scale = 1.0
        for residual in (self.exchange.worker_residual, self.exchange.owner_residual):
            if residual is not None:
                residual.zero_()


class WeightDifferences:
    """Gives the owners' new weights of one bucket to every rank, as differences against `bucket.flat`, through a codec.

    Ranks hold the same bits where they did before: all of them, the owner too, add what was decoded.
    """

    def __init__(self, bucket: FlatBucket, exchange: ExchangeFromOwners) -> None:
        self._bucket, self._exchange = bucket, exchange
        self._starts = 0

    def publish(self, own: Tensor) -> Callable[[], None]:
        """Send how much `own`, fp32 [shard], is ahead; returns what waits until every rank has it."""
        bucket, exchange = self._bucket, self._exchange
        self._starts += 1
        exchange.start_from_owners(own.to(bucket.flat.device) - bucket.shard_of(bucket.flat), self._starts)

        def wait() -> None:
            exchange.wait()
            exchange.outcome()
            ahead = torch.empty_like(bucket.flat, dtype=torch.float32)
            exchange.read(ahead)
            for gap in bucket.layout.gaps:
                ahead[gap].zero_()
            bucket.flat.add_(ahead)

        return wait


def rounded_gradients(
    parameters: ShardedParameters, seal: Seal, loss_scale: Callable[[], float]
) -> list[RoundedGradients]:
    """Make what sends every bucket's gradients, times `loss_scale`, through the codec that was asked for, nothing if
    none was, and at stages 1 and 2 have weights go back as differences."""
    sharding = parameters.sharding
    if sharding.codecs is None:
        return []
    found, compiled = [], False
    for one in parameters.master_weights:
        bucket, names = one.bucket, sharding.codecs_of(one.bucket.layout)
        assert names is not None
        there, back = (make_codec(name, bucket.layout.block_size) for name in names)
        over = parameters.exchange_comm, parameters.links, bucket.layout.numel
        filled = bucket.layout.filled
        trims = sum(filled) < _WORTH_TRIMMING * bucket.layout.padded_numel
        given: dict[str, Any] = {
            "bucket": bucket.index,
            "device": bucket.flat.device,
            "filled": filled if trims else None,
        }
        exchange: Exchange
        if one.ahead:
            exchange = leg_1 = make_exchange(ExchangeToOwners, *over, there, **given)
            if sharding.low_rank and bucket.layout.whole:
                leg_1.send_apart([(slot.offset, held.shape) for slot, held in bucket.members()], sharding.low_rank)
            one.send = WeightDifferences(bucket, make_exchange(ExchangeFromOwners, *over, back, **given)).publish
        else:
            exchange = make_exchange(Exchange, *over, there, **given)
        compiled |= there.has_kernels or back.has_kernels
        found.append(RoundedGradients(bucket, sharding, seal, exchange, loss_scale))
    if compiled:
        prepare_kernels(parameters.device.type, ("encode", "average_and_encode", "decode"))
        wait_for_kernels(parameters.device.type)
    return found


def check_arrived(gradients: Sequence[RoundedGradients]) -> None:
    """Raise PacketError, on every rank, unless all that arrived is of this step."""
    filled = [one.exchange for one in gradients if one.filled]
    bring_headers(filled)
    for exchange in filled:
        exchange.outcome()


def bytes_of_rounding(gradients: Sequence[RoundedGradients], parameters: ShardedParameters) -> dict[str, float]:
    """Bytes that this rank holds for gradients, residuals and master weights, in place of an exact average's; nothing
    without a codec."""
    if not gradients:
        return {}
    added = residuals = weights = 0
    for one, of_bucket in zip(gradients, parameters.master_weights, strict=True):
        exchange = one.exchange
        added += one.gathering_bytes()
        for residual in (exchange.worker_residual, exchange.owner_residual):
            residuals += 0 if residual is None else residual.nbytes
        weights += of_bucket.weights.nbytes if of_bucket.separate else 0
    return {"gradients": float(added), "residuals": float(residuals), "master weights": float(weights)}


# Checkpoints


def ranks_with_residuals(
    gradients: Sequence[RoundedGradients], source: SliceSource, parameters: ShardedParameters
) -> list[int] | None:
    """The ranks whose residuals this one goes on with: its own, or of another number of ranks all; None if one's were
    not saved, or cannot be had here, as those of other nodes.

    Raises DamagedStateError if some parameters' were, and not all.
    """
    ranks, names = ranks_of_residuals(source, parameters.comm, parameters.saved_nodes), parameters.names
    if ranks is None:
        return None
    runs = [run for one in gradients for run in runs_in(one.layout, one.exchange.worker_place)]
    wanted = {f"{_OF_RANK}.{names[run.parameter]}" for run in runs}
    missing = [wanted.difference(source.rank_keys(rank)) for rank in ranks]
    if any(one == wanted for one in missing):
        return None
    for rank, keys in zip(ranks, missing, strict=True):
        if keys:
            raise DamagedStateError(f"it lacks what this optimizer goes on from: {min(keys)} of rank {rank}")
    return ranks


def load_residuals(gradients: Sequence[RoundedGradients], source: SliceSource, parameters: ShardedParameters) -> None:
    """Take over the residuals of all buckets, with a warning if they are there and cannot be had."""
    ranks = ranks_with_residuals(gradients, source, parameters)
    for one in gradients:
        one.reset()
        if ranks is not None:
            one.load(source, parameters.names, ranks)
    if ranks is None and _was_rounded(source):
        warn_of_lost_residuals(source, parameters.comm)


def _was_rounded(source: SliceSource) -> bool:
    keys = (key for rank in range(source.world_size) for key in source.rank_keys(rank))
    return any(key.startswith(_OF_RANK) for key in keys)
