"""A freeze group in a checkpoint, by parameter name, so that it outlives buckets, homes and numbers of ranks:
residuals, state and counters, on the same ranks, on others, or in the other home."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from thinwire.comm import Communicator
from thinwire.optim.algorithm import Algorithm, Clock
from thinwire.optim.bucket import AlgorithmBucket, place_of
from thinwire.optim.freeze_group import FreezeGroup
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.zero import BucketLayout
from thinwire.zero.home import TRAFFIC
from thinwire.zero.master_weights import Run
from thinwire.zero.saved_state import SavedSlice, SliceSource

__all__ = [
    "LEFT_OUT_STEPS",
    "OWNER_RESIDUAL",
    "check_settings",
    "counters",
    "load",
    "load_counters",
    "load_owner_residual",
    "load_worker_residual",
    "mean_over_ranks",
    "owner_residual_slices",
    "rank_tensors",
    "ranks_to_resume",
    "read_left_out_steps",
    "runs_in",
    "slices",
    "worker_residual_tensors",
]


OWNER_RESIDUAL = "owner_residual"
_WORKER_RESIDUAL = "worker_residual"


def runs_in(layout: BucketLayout, place: slice) -> Iterator[Run]:
    """The stretches of parameters in elements `place` of a bucket, with places relative to its start."""
    for slot in layout.slots:
        first, last = max(slot.offset, place.start), min(slot.offset + slot.numel, place.stop)
        if first < last:
            yield Run(slot.parameter, first - slot.offset, slice(first - place.start, last - place.start))


def owner_residual_slices(
    layout: BucketLayout, place: slice, residual: Tensor, names: Sequence[str]
) -> Iterator[SavedSlice]:
    """What an owner's residual of elements `place` of a bucket is saved as."""
    for run in runs_in(layout, place):
        yield SavedSlice(OWNER_RESIDUAL, names[run.parameter], run.start, residual[run.place])


def worker_residual_tensors(
    layout: BucketLayout, place: slice, residual: Tensor, names: Sequence[str]
) -> dict[str, Tensor]:
    """What a worker's residual of elements `place` of a bucket is saved as."""
    return {f"{_WORKER_RESIDUAL}.{names[run.parameter]}": residual[run.place] for run in runs_in(layout, place)}


def load_owner_residual(
    layout: BucketLayout, place: slice, residual: Tensor, names: Sequence[str], source: SliceSource
) -> None:
    """Take an owner's residual over; raises KeyError where one was not saved."""
    for run in runs_in(layout, place):
        residual[run.place].copy_(source.read(OWNER_RESIDUAL, names[run.parameter], run.start, run.numel))


def load_worker_residual(
    layout: BucketLayout,
    place: slice,
    residual: Tensor,
    names: Sequence[str],
    source: SliceSource,
    ranks: Sequence[int],
) -> None:
    """Take over the mean of what `ranks` saved as their residuals; raises KeyError where one did not.

    The average over ranks of payload + residual, which is what everybody receives, is then what it would have been.
    """
    for run in runs_in(layout, place):
        mean = mean_over_ranks(source, f"{_WORKER_RESIDUAL}.{names[run.parameter]}", ranks)
        residual[run.place].copy_(mean[run.start : run.start + run.numel] if len(mean) != run.numel else mean)


def mean_over_ranks(source: SliceSource, key: str, ranks: Sequence[int]) -> Tensor:
    """The mean of these ranks' tensors, fp32."""
    total = source.read_rank(key, ranks[0]).float().clone()
    for rank in ranks[1:]:
        total += source.read_rank(key, rank).float()
    return total.div_(len(ranks))


def ranks_to_resume(
    source: SliceSource, comm: Communicator, nodes: Sequence[int] | None, saved_by: str, compresses: bool
) -> list[int] | None:
    """The ranks whose residuals this one goes on with: its own, or of another number of ranks all; None for none.

    `nodes`: the node of each rank, where residuals belong to nodes. Warns where an optimizer that `compresses` has to
    begin without.
    """
    saved_nodes = source.counters()["nodes"]
    same = source.world_size == comm.size and saved_nodes == nodes
    ranks = [comm.rank] if same else list(range(source.world_size))
    if same or (nodes is None and saved_nodes is None):
        try:
            for rank in ranks:
                source.read_rank(TRAFFIC, rank)
        except KeyError:
            pass
        else:
            return ranks
    if compresses:
        warnings.warn(
            f"this state was saved by {saved_by} of {source.world_size} and is loaded by rank {comm.rank} of "
            f"{comm.size}, or on other nodes: error-feedback residuals belong to one rank, so they start from zero "
            "here. To keep them, save and load state_dict() on every rank",
            RuntimeWarning,
            stacklevel=6,
        )
    return None


LEFT_OUT_STEPS = "left_out_steps"
"""The key of local steps to which a rank added nothing, for each freeze group."""


def read_left_out_steps(source: SliceSource, rank: int, count: int) -> list[int]:
    """Those of `rank` for `count` freeze groups; none where it was saved by a home without local steps."""
    try:
        steps: list[int] = source.read_rank(LEFT_OUT_STEPS, rank).tolist()
    except KeyError:
        return [0] * count
    return steps


def slices(group: FreezeGroup, names: Sequence[str], rank: int) -> list[SavedSlice]:
    """The share of `rank` of what all ranks hold, what it keeps as an owner, and the residual that it owns."""
    found: list[SavedSlice] = []
    for bucket in group.buckets:
        first = rank * bucket.layout.shard
        own = slice(first, first + bucket.layout.shard)
        whole = bucket.whole_state
        common = {name: whole[name][own] if name in whole else bucket.state[name] for name in _common(group, bucket)}
        for run in runs_in(bucket.layout, own):
            values = {name: one[run.place] for name, one in common.items()}
            values |= group.weights.saved(bucket, run, group.shows_own_weights)
            found += [SavedSlice(kind, names[run.parameter], run.start, one) for kind, one in values.items()]
        if group.compresses:
            exchange = bucket.compressed
            assert exchange.owner_residual is not None
            found += owner_residual_slices(bucket.layout, exchange.owner_place, exchange.owner_residual, names)
    return found


def rank_tensors(group: FreezeGroup, names: Sequence[str]) -> dict[str, Tensor]:
    """The rank's own residuals and, where local steps make state its own, that state."""
    found: dict[str, Tensor] = {}
    for bucket in group.buckets:
        if group.compresses:
            exchange = bucket.compressed
            assert exchange.worker_residual is not None
            found |= worker_residual_tensors(bucket.layout, exchange.worker_place, exchange.worker_residual, names)
        for kind in set(bucket.state) - set(_common(group, bucket)):
            for slot in bucket.layout.slots:
                found[f"{kind}.{names[slot.parameter]}"] = bucket.state[kind][place_of(slot)]
    return found


def counters(clock: Clock, rule: FreezeRule | None, algorithm: Algorithm, names: Sequence[str]) -> dict[str, Any]:
    """Where parameters that entered together are, as plain values."""
    return {
        "steps": clock.steps,
        "frozen_at": clock.frozen_at,
        "rule": None if rule is None else rule.state(),
        "scalars": algorithm.scalars(names),
    }


def load_counters(
    clock: Clock, rule: FreezeRule | None, algorithm: Algorithm, saved: Mapping[str, Any], names: Sequence[str]
) -> None:
    """Take over what `counters` returned, but for the freeze."""
    clock.steps = saved["steps"]
    if rule is not None and saved["rule"] and saved["rule"].keys() == rule.state().keys():
        rule.load(saved["rule"])  # else freeze_step was changed: the new rule starts afresh
    algorithm.load_scalars(saved["scalars"], names)


def check_settings(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raise ValueError where `saved` settings would give momenta and residuals another meaning."""
    for setting, value in mine.items():
        if setting in saved and saved[setting] != value:
            raise ValueError(
                f"this state was saved with {setting}={saved[setting]!r}; this optimizer has {setting}={value!r}. "
                "Build it with the same"
            )


def load(
    group: FreezeGroup,
    names: Sequence[str],
    saved: Mapping[str, Any],
    source: SliceSource,
    ranks: Sequence[int] | None,
) -> None:
    """Take over a freeze group whose buckets are laid out already; KeyError where state was not saved.

    `ranks`: whose residuals and own state to take the mean of, the averages that the next exchange makes of which are
    what they would have been; None where they cannot be had.
    """
    load_counters(group.clock, group.rule, group.algorithm, saved, names)
    if saved["frozen_at"] is not None and group.algorithm.freezes:
        group.begin_frozen_state()
    group.clock.frozen_at = saved["frozen_at"]
    for bucket in group.buckets:
        common = _common(group, bucket)
        for kind, values in bucket.whole_state.items():
            for slot in (one for one in bucket.layout.slots if one.numel):
                name = names[slot.parameter]
                own = kind not in common and ranks is not None
                read = mean_over_ranks(source, f"{kind}.{name}", ranks or ()) if own else None
                values[place_of(slot)].copy_(source.read(kind, name, 0, slot.numel) if read is None else read)
        for kind in bucket.owned:
            for run in runs_in(bucket.layout, bucket.compressed.owner_place):
                bucket.state[kind][run.place].copy_(source.read(kind, names[run.parameter], run.start, run.numel))
    group.restore()
    for bucket in group.buckets if ranks is not None and group.compresses else ():
        exchange = bucket.compressed
        assert exchange.worker_residual is not None
        assert exchange.owner_residual is not None
        load_worker_residual(bucket.layout, exchange.worker_place, exchange.worker_residual, names, source, ranks or ())
        load_owner_residual(bucket.layout, exchange.owner_place, exchange.owner_residual, names, source)
        if bucket.zero_variance is not None:
            exchange.hold_zero(bucket.zero_variance)


def _common(group: FreezeGroup, bucket: AlgorithmBucket) -> list[str]:
    """The state that every rank has alike, or its owner alone."""
    own = group.local.own_state if group.local is not None and group.clock.frozen else frozenset()
    return [kind for kind in bucket.state if kind not in own]
