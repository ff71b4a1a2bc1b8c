"""What sharded 0/1 Adam saves, as runs of named parameters and as every worker's own tensors, and how another number of
ranks takes it up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.optim.sharded.full_bucket import ShardedZeroOneBucket
from thinwire.zero import Piece, PieceSource

__all__ = ["load_buckets", "own_tensors", "save_buckets"]

_MOMENTUM, _VARIANCE, _DENOMINATOR, _OWNER_RESIDUAL = "exp_avg", "exp_avg_sq", "denominator", "owner_residual"
_WORKER_RESIDUAL, _MEAN_MOMENTUM = "worker_residual", "mean_momentum"


def save_buckets(buckets: Sequence[ShardedZeroOneBucket], names: Sequence[str]) -> list[Piece]:
    """Return this rank's shard of what all have in common: weights and masters, denominators, owners' residuals; until
    the variance is frozen also momentum and variance."""
    pieces = []
    for one in buckets:
        bucket = one.bucket
        own = {
            "weight": bucket.shard_of(one.weights.values).to(bucket.dtype),
            _DENOMINATOR: bucket.shard_of(one.denominators),
            _OWNER_RESIDUAL: one.exchange.owner_residual,
        }
        if one.weights.own_masters is not None:
            own["master"] = one.weights.own_masters
        if one.variance is not None:
            own[_VARIANCE] = one.weights.shard_of(one.variance)
            own[_MOMENTUM] = bucket.shard_of(one.momentum)
        for run in bucket.own_runs:
            for kind, shard in own.items():
                assert shard is not None
                pieces.append(Piece(kind, names[run.parameter], run.start, shard[run.place]))
    return pieces


def own_tensors(buckets: Sequence[ShardedZeroOneBucket], names: Sequence[str]) -> dict[str, Tensor]:
    """Return this worker's residual and, once the variance is frozen, its momenta, by parameter."""
    tensors = {}
    for one in buckets:
        for slot in one.layout.slots:
            for kind, values in _own(one).items():
                tensors[f"{kind}.{names[slot.parameter]}"] = values[slot.offset : slot.offset + slot.numel]
    return tensors


def load_buckets(
    buckets: Sequence[ShardedZeroOneBucket], names: Sequence[str], source: PieceSource, rank: int, size: int
) -> None:
    """Take over what was saved; the weights are there already. Raises KeyError where something was not saved.

    From another number of ranks every worker gets the mean of the saved workers' own tensors: the averages that the
    next exchange makes of them are then what they would have been.
    """
    ranks = [rank] if source.world_size == size else list(range(source.world_size))
    for one in buckets:
        for slot in one.layout.slots:
            if not slot.numel:  # nothing of it was saved
                continue
            name, place = names[slot.parameter], slice(slot.offset, slot.offset + slot.numel)
            one.denominators[place].copy_(source.read(_DENOMINATOR, name, 0, slot.numel))
            if one.variance is not None:
                one.momentum[place].copy_(source.read(_MOMENTUM, name, 0, slot.numel))
            for kind, values in _own(one).items():
                values[place].copy_(_mean_of_ranks(source, f"{kind}.{name}", ranks, slot.numel))
        assert one.exchange.owner_residual is not None
        for run in one.bucket.own_runs:
            saved = source.read(_OWNER_RESIDUAL, names[run.parameter], run.start, run.numel)
            one.exchange.owner_residual[run.place].copy_(saved)
        if one.variance is not None:
            for run in one.weights.own_runs:
                saved = source.read(_VARIANCE, names[run.parameter], run.start, run.numel)
                one.variance[run.place].copy_(saved)
        one.find_still()


def _own(one: ShardedZeroOneBucket) -> dict[str, Tensor]:
    assert one.exchange.worker_residual is not None
    own = {_WORKER_RESIDUAL: one.exchange.worker_residual}
    if one.variance is None:
        own |= {_MOMENTUM: one.momentum, _MEAN_MOMENTUM: one.mean_momentum}
    return own


def _mean_of_ranks(source: PieceSource, key: str, ranks: Sequence[int], numel: int) -> Tensor:
    total = torch.zeros(numel)
    for rank in ranks:
        total += source.read_rank(key, rank).float()
    return total.div_(len(ranks))
