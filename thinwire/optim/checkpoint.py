"""A freeze group in a checkpoint, by parameter name, so that it outlives buckets, homes and numbers of ranks:
residuals, state and counters, on the same ranks, on others, or in the other home."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from thinwire.comm import Communicator
from thinwire.optim.bucket import Bucket, place_of
from thinwire.optim.freeze_group import FreezeGroup
from thinwire.optim.storage import mean_over_ranks
from thinwire.zero.home import TRAFFIC
from thinwire.zero.master_weights import runs_in
from thinwire.zero.saved_state import OneRankState, SavedSlice, SliceSource

OWNER_RESIDUAL = "owner_residual"
_WORKER_RESIDUAL = "worker_residual"

LEFT_OUT_STEPS = "left_out_steps"
"""The key of local steps to which a rank added nothing, for each freeze group."""


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


def saved_by(source: SliceSource) -> str:
    """How a warning calls what saved `source`."""
    return f"rank {source.rank}" if isinstance(source, OneRankState) else "a job"


def slices(group: FreezeGroup, names: Sequence[str], rank: int) -> list[SavedSlice]:
    """The share of `rank` of what all ranks hold, what it keeps as an owner, and the residual that it owns."""
    found: list[SavedSlice] = []
    local, frozen = group.local is not None, group.clock.frozen_at is not None
    for bucket in group.buckets:
        first = rank * bucket.layout.shard
        own = slice(first, first + bucket.layout.shard)
        state = group.storage.saved_state(bucket, own, _common(group, bucket))
        for run in runs_in(bucket.layout, own):
            values = {name: one[run.place] for name, one in state.items()}
            values |= group.storage.saved(bucket, run, local and frozen)
            found += [SavedSlice(kind, names[run.parameter], run.start, one) for kind, one in values.items()]
        if local or frozen:
            exchange = bucket.compressed
            assert exchange.owner_residual is not None
            for run in runs_in(bucket.layout, exchange.owner_place):
                residual = exchange.owner_residual[run.place]
                found.append(SavedSlice(OWNER_RESIDUAL, names[run.parameter], run.start, residual))
    return found


def rank_tensors(group: FreezeGroup, names: Sequence[str]) -> dict[str, Tensor]:
    """The rank's own residuals and, where local steps make state its own, that state."""
    found: dict[str, Tensor] = {}
    for bucket in group.buckets:
        if group.local is not None or group.clock.frozen_at is not None:
            exchange = bucket.compressed
            assert exchange.worker_residual is not None
            for run in runs_in(bucket.layout, exchange.worker_place):
                found[f"{_WORKER_RESIDUAL}.{names[run.parameter]}"] = exchange.worker_residual[run.place]
        for kind in set(bucket.state) - set(_common(group, bucket)):
            for slot in bucket.layout.slots:
                found[f"{kind}.{names[slot.parameter]}"] = bucket.state[kind][place_of(slot)]
    return found


def counters(group: FreezeGroup, names: Sequence[str]) -> dict[str, Any]:
    """Where parameters that entered together are, as plain values."""
    return {
        "steps": group.clock.steps,
        "frozen_at": group.clock.frozen_at,
        "rule": None if group.rule is None else group.rule.state(),
        "scalars": group.algorithm.scalars(names),
    }


def check_settings(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raise ValueError where `saved` settings would give momenta and residuals another meaning."""
    for setting, value in mine.items():
        if setting in saved and saved[setting] != value:
            raise ValueError(
                f"this state was saved with {setting}={saved[setting]!r}; this optimizer has {setting}={value!r}. "
                "Build it with the same"
            )


def load(
    groups: Sequence[FreezeGroup],
    names: Sequence[str],
    saved: Sequence[Mapping[str, Any]],
    source: SliceSource,
    ranks: Sequence[int] | None,
) -> None:
    """Take over freeze groups, with their `saved` counters, whose buckets are laid out already; KeyError where state
    was not saved.

    `ranks`: whose residuals and own state to take the mean of, the averages that the next exchange makes of which are
    what they would have been; None where they cannot be had.
    """
    for group, of_group in zip(groups, saved, strict=True):
        group.clock.steps = of_group["steps"]
        rule = group.rule
        if rule is not None and of_group["rule"] and of_group["rule"].keys() == rule.state().keys():
            rule.load(of_group["rule"])  # else freeze_step was changed: the new rule starts afresh
        group.algorithm.load_scalars(of_group["scalars"], names)
        if of_group["frozen_at"] is not None and group.algorithm.freezes:
            group.storage.begin_frozen_state()
        group.clock.frozen_at = of_group["frozen_at"]
        for bucket in group.buckets:
            group.storage.load_state(bucket, names, source, _common(group, bucket), ranks)
        group.restore()
        compresses = group.local is not None or group.clock.frozen_at is not None
        for bucket in group.buckets if ranks is not None and compresses else ():
            _load_residuals(bucket, names, source, ranks or ())


def _load_residuals(bucket: Bucket, names: Sequence[str], source: SliceSource, ranks: Sequence[int]) -> None:
    """Take over an owner's residual, and the mean of what `ranks` saved as their own; KeyError where one did not.

    The average over ranks of payload + residual, which is what every rank receives, is then what it would have been.
    """
    exchange = bucket.compressed
    worker, owner = exchange.worker_residual, exchange.owner_residual
    assert worker is not None
    assert owner is not None
    for run in runs_in(bucket.layout, exchange.worker_place):
        mean = mean_over_ranks(source, f"{_WORKER_RESIDUAL}.{names[run.parameter]}", ranks)
        worker[run.place].copy_(mean[run.start : run.start + run.numel] if len(mean) != run.numel else mean)
    lost = owner.clone()  # as packets were cut anew
    for run in runs_in(bucket.layout, exchange.owner_place):
        owner[run.place].copy_(source.read(OWNER_RESIDUAL, names[run.parameter], run.start, run.numel))
    if lost.any():
        owner.add_(lost)
    if bucket.zero_variance is not None:
        exchange.hold_zero(bucket.zero_variance)


def _common(group: FreezeGroup, bucket: Bucket) -> list[str]:
    """The state that every rank has alike, or its owner alone."""
    own = group.local.own_state if group.local is not None and group.clock.frozen_at is not None else frozenset()
    return [kind for kind in bucket.state if kind not in own]
