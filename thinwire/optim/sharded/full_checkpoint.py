"""What a checkpoint holds of full state, as slices of named parameters and as every rank's own tensors, and how another
number of ranks takes it up."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from thinwire.optim.algorithm import Algorithm, Keep
from thinwire.optim.bucket import AlgorithmBucket, place_of
from thinwire.optim.residuals import (
    load_owner_residual,
    load_worker_residual,
    mean_over_ranks,
    owner_residual_slices,
    worker_residual_tensors,
)
from thinwire.optim.sharded.common_weights import CommonWeights
from thinwire.zero.saved_slices import Piece, PieceSource

__all__ = ["load", "rank_tensors", "slices"]


def slices(
    buckets: Sequence[AlgorithmBucket],
    weights: Sequence[CommonWeights],
    algorithm: Algorithm,
    frozen: bool,
    names: Sequence[str],
) -> list[Piece]:
    """This rank's share of what all have in common: weights, master weights, state and owners' residuals."""
    found: list[Piece] = []
    for bucket, of_bucket in zip(buckets, weights, strict=True):
        flat = of_bucket.bucket
        own = {"weight": flat.shard_of(of_bucket.values).to(flat.dtype)}
        if of_bucket.masters.separate:
            own["master"] = of_bucket.masters.weights
        for name in _common(bucket, algorithm, frozen):
            owned = algorithm.state.get(name) is Keep.OWNER
            own[name] = bucket.state[name] if owned else flat.shard_of(bucket.state[name])
        for run in flat.own_runs:
            found += [Piece(kind, names[run.parameter], run.start, shard[run.place]) for kind, shard in own.items()]
        exchange = bucket.compressed
        assert exchange.owner_residual is not None
        found += owner_residual_slices(bucket.layout, exchange.owner_place, exchange.owner_residual, names)
    return found


def rank_tensors(
    buckets: Sequence[AlgorithmBucket], algorithm: Algorithm, frozen: bool, names: Sequence[str]
) -> dict[str, Tensor]:
    """This rank's residual and, where local steps make state its own, that state."""
    found: dict[str, Tensor] = {}
    for bucket in buckets:
        exchange = bucket.compressed
        assert exchange.worker_residual is not None
        found |= worker_residual_tensors(bucket.layout, exchange.worker_place, exchange.worker_residual, names)
        for name in set(bucket.state) - set(_common(bucket, algorithm, frozen)):
            for slot in bucket.layout.slots:
                found[f"{name}.{names[slot.parameter]}"] = bucket.state[name][place_of(slot)]
    return found


def load(
    buckets: Sequence[AlgorithmBucket],
    weights: Sequence[CommonWeights],
    algorithm: Algorithm,
    frozen: bool,
    names: Sequence[str],
    source: PieceSource,
    ranks: Sequence[int] | None,
) -> None:
    """Take over what was saved; the weights are there already. Raises KeyError where something was not saved.

    `ranks`: whose residuals and own state to take the mean of; None where they cannot be had. The averages that the next
    exchange makes of means are what they would have been.
    """
    for bucket, of_bucket in zip(buckets, weights, strict=True):
        common = _common(bucket, algorithm, frozen)
        for name, values in bucket.state.items():
            if algorithm.state.get(name) is Keep.OWNER:
                for run in of_bucket.bucket.own_runs:
                    values[run.place].copy_(source.read(name, names[run.parameter], run.start, run.numel))
                continue
            for slot in (one for one in bucket.layout.slots if one.numel):
                parameter = names[slot.parameter]
                if name in common or ranks is None:
                    saved = source.read(name, parameter, 0, slot.numel)
                else:
                    saved = mean_over_ranks(source, f"{name}.{parameter}", ranks)
                values[place_of(slot)].copy_(saved)
        if ranks is not None:
            exchange = bucket.compressed
            assert exchange.worker_residual is not None
            assert exchange.owner_residual is not None
            load_worker_residual(bucket.layout, exchange.worker_place, exchange.worker_residual, names, source, ranks)
            load_owner_residual(bucket.layout, exchange.owner_place, exchange.owner_residual, names, source)
        bucket.find_zero_variance()


def _common(bucket: AlgorithmBucket, algorithm: Algorithm, frozen: bool) -> list[str]:
    """The state that every rank has alike."""
    own = algorithm.own_state if frozen else frozenset()
    return [name for name in bucket.state if name not in own]
