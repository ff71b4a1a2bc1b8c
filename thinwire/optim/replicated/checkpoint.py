"""What a checkpoint holds of state that every rank holds, by parameter name, and how it comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from thinwire.optim.bucket import AlgorithmBucket, place_of
from thinwire.optim.replicated.freeze_group import FreezeGroup
from thinwire.optim.replicated.parameters import ParameterTable
from thinwire.optim.residuals import (
    load_owner_residual,
    load_worker_residual,
    mean_over_ranks,
    owner_residual_slices,
    runs_in,
    worker_residual_tensors,
)
from thinwire.zero.saved_slices import Piece, PieceSource

__all__ = [
    "check_settings",
    "group_counters",
    "load_group",
    "load_masters",
    "rank_tensors",
    "slices",
    "unplaced_slices",
]


def slices(group: FreezeGroup, table: ParameterTable, rank: int) -> list[Piece]:
    """The share of `rank` of what all ranks hold, and the residual that it owns."""
    found: list[Piece] = []
    for bucket in group.buckets:
        first = rank * bucket.layout.shard
        own = slice(first, first + bucket.layout.shard)
        for run in runs_in(bucket.layout, own):
            name = table.names[run.parameter]
            for kind in _common(group, bucket):
                found.append(Piece(kind, name, run.start, bucket.state[kind][own][run.place]))
            weight, master = _weight_and_master(table, run.parameter, group.shows_own_weights)
            for kind, tensor in (("weight", weight), ("master", master)):
                if tensor is not None:
                    values = tensor.reshape(-1)[run.start : run.start + run.numel]
                    found.append(Piece(kind, name, run.start, values))
        if group.compresses:
            exchange = bucket.compressed
            assert exchange.owner_residual is not None
            found += owner_residual_slices(bucket.layout, exchange.owner_place, exchange.owner_residual, table.names)
    return found


def rank_tensors(group: FreezeGroup, table: ParameterTable) -> dict[str, Tensor]:
    """This rank's residuals and, where local steps make state its own, that state."""
    found: dict[str, Tensor] = {}
    for bucket in group.buckets:
        if group.compresses:
            exchange = bucket.compressed
            assert exchange.worker_residual is not None
            found |= worker_residual_tensors(
                bucket.layout, exchange.worker_place, exchange.worker_residual, table.names
            )
        for kind in set(bucket.state) - set(_common(group, bucket)):
            for slot in bucket.layout.slots:
                found[f"{kind}.{table.names[slot.parameter]}"] = bucket.state[kind][place_of(slot)]
    return found


def _weight_and_master(table: ParameterTable, index: int, shows_own: bool) -> tuple[Tensor, Tensor | None]:
    """A parameter's weights as all ranks have them in common, and its master weight where there is one."""
    parameter = table.parameters[index].detach()
    master: Tensor | None = table.state(index).get("master")
    return (master.to(parameter.dtype) if shows_own and master is not None else parameter), master


def group_counters(group: FreezeGroup, table: ParameterTable) -> dict[str, Any]:
    """Where a freeze group is, and the parameters of its buckets, as plain values."""
    return {
        "steps": group.clock.steps,
        "frozen_at": group.clock.frozen_at,
        "rule": None if group.rule is None else group.rule.state(),
        "scalars": group.algorithm.scalars(table.names),
        "buckets": [[table.names[slot.parameter] for slot in bucket.layout.slots] for bucket in group.buckets],
    }


def check_settings(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raise ValueError where `saved` settings would give momenta and residuals another meaning."""
    for setting, value in mine.items():
        if setting in saved and saved[setting] != value:
            raise ValueError(
                f"this state was saved with {setting}={saved[setting]!r}; this optimizer has {setting}={value!r}. Build "
                "it with the same"
            )


def load_masters(table: ParameterTable, source: PieceSource) -> None:
    """Take master weights over where there are any; parameters that have none become their own again."""
    for index, name in enumerate(table.names):
        table.make_master(index)
        weight = table.weight(index)
        try:
            weight.detach().copy_(source.read("master", name, 0, weight.numel()).view(weight.shape))
        except KeyError:
            continue


def load_group(
    group: FreezeGroup,
    table: ParameterTable,
    saved: Mapping[str, Any],
    source: PieceSource,
    ranks: Sequence[int] | None,
) -> None:
    """Take over a freeze group whose buckets are laid out already; KeyError where state was not saved.

    `ranks`: whose residuals to take the mean of, this rank alone where it is the one that saved; None for none.
    """
    group.clock.steps = saved["steps"]
    if group.rule is not None and saved["rule"] is not None and saved["rule"].keys() == group.rule.state().keys():
        group.rule.load(saved["rule"])  # else freeze_step was changed: the new rule starts afresh
    group.algorithm.load_scalars(saved["scalars"], table.names)
    if saved["frozen_at"] is not None and group.algorithm.freezes:
        group.rename_state()
    group.clock.frozen_at = saved["frozen_at"]
    for bucket in group.buckets:
        for slot in (one for one in bucket.layout.slots if one.numel):
            for kind, values in bucket.state.items():
                values[place_of(slot)].copy_(
                    _read(group, bucket, kind, table.names[slot.parameter], slot.numel, source, ranks)
                )
    group.restore()
    if ranks is not None and group.compresses:
        for bucket in group.buckets:
            _load_residuals(bucket, table, source, ranks)


def _read(
    group: FreezeGroup,
    bucket: AlgorithmBucket,
    kind: str,
    name: str,
    numel: int,
    source: PieceSource,
    ranks: Sequence[int] | None,
) -> Tensor:
    if kind in _common(group, bucket):
        return source.read(kind, name, 0, numel)
    if ranks is None:  # what another rank has made of it alone
        return source.read(kind, name, 0, numel)
    return mean_over_ranks(source, f"{kind}.{name}", ranks)


def _load_residuals(bucket: AlgorithmBucket, table: ParameterTable, source: PieceSource, ranks: Sequence[int]) -> None:
    exchange = bucket.compressed
    assert exchange.worker_residual is not None
    assert exchange.owner_residual is not None
    load_worker_residual(bucket.layout, exchange.worker_place, exchange.worker_residual, table.names, source, ranks)
    load_owner_residual(bucket.layout, exchange.owner_place, exchange.owner_residual, table.names, source)
    if bucket.zero_variance is not None:
        exchange.hold_zero(bucket.zero_variance)


def _common(group: FreezeGroup, bucket: AlgorithmBucket) -> list[str]:
    """The state that every rank has alike."""
    own = group.algorithm.own_state if group.clock.frozen else frozenset()
    return [kind for kind in bucket.state if kind not in own]


def unplaced_slices(table: ParameterTable, placed: set[int]) -> list[Piece]:
    """The weights of parameters that wait for their first gradient."""
    found = []
    for index, parameter in enumerate(table.parameters):
        if index not in placed and parameter.requires_grad:
            weight, master = _weight_and_master(table, index, False)
            found.append(Piece("weight", table.names[index], 0, weight.reshape(-1)))
            if master is not None:
                found.append(Piece("master", table.names[index], 0, master.reshape(-1)))
    return [piece for piece in found if piece.tensor.numel()]
