"""The base of both homes of algorithms, the errors that both raise, and a freeze group in a checkpoint: by parameter
name, so that it outlives buckets, homes and numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.compress.exchange import Exchange, hold_zero
from thinwire.optim.algorithm import FreezeRule, LocalSteps
from thinwire.optim.bucket import Bucket, place_of, scale_residuals
from thinwire.optim.freeze_group import FreezeGroup
from thinwire.optim.options import COMPRESSED_WIRES, HomeOptions, Recipe
from thinwire.optim.step import AlgorithmCounters, Step
from thinwire.optim.storage import PACKED_MOMENTUM, PACKED_PRECONDITIONER, PRECONDITIONER_HIGH, PRECONDITIONER_LOW
from thinwire.zero.home import TRAFFIC, Home
from thinwire.zero.master_weights import runs_in
from thinwire.zero.rank_state import OneRankState, warn_of_lost_residuals
from thinwire.zero.saved_state import (
    DamagedStateError,
    SavedSlice,
    SliceSource,
    check_saved,
    check_weights,
    mean_over_ranks,
    ranks_of_residuals,
)

_OWNER_RESIDUAL = "owner_residual"
_WORKER_RESIDUAL = "worker_residual"
_WARMUP = "warmup_"
"""What residuals of the warmup's wire are called by, before these."""
_LEFT_OUT_STEPS = "left_out_steps"
"""The key of local steps to which a rank added nothing, for each freeze group."""


class AlgorithmHome(Home):
    """A Home in which an algorithm lives.

    `groups`: the freeze groups, in the order in which they entered. `in_flight`: the step that their buckets share.
    """

    counted = AlgorithmCounters
    groups: list[FreezeGroup]
    in_flight: Step
    _recipe: Recipe
    _options: HomeOptions

    def _make_rule(self) -> FreezeRule | None:
        """Make the rule that ends the warmup of parameters that enter now."""
        betas = [group["betas"][1] for group in self.in_flight.groups if "betas" in group]
        return self._recipe.rule(max(betas, default=0.0))

    @property
    def recipe(self) -> Recipe:
        """What parameters step by; a new one says when those freeze that have not yet."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe) -> None:
        self._recipe = recipe
        for group in self.groups:
            group.rule = self._make_rule()

    @property
    @override
    def steps(self) -> int:  # type: ignore[override]
        return self.in_flight.number

    @property
    def frozen(self) -> bool:
        """Whether all parameters' steps are compressed."""
        return all(group.clock.frozen for group in self.groups) if self.groups else self.frozen_at is not None

    @property
    @override
    def frozen_at(self) -> int | None:  # type: ignore[override]
        if self.groups:
            return self.groups[0].clock.frozen_at
        return None if self._recipe.algorithm().freezes else 0

    @property
    @override
    def in_sync(self) -> bool:  # type: ignore[override]
        return all(group.in_sync for group in self.groups)

    @property
    def left_out_steps(self) -> int:
        """Local steps to which this rank added nothing, as its gradient was not finite."""
        return sum(group.left_out_steps for group in self.groups)

    @property
    @override
    def loss_scale(self) -> float:
        return self.in_flight.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        """Between backward() and step() a new one is noted; what left as if it were another is sent again."""
        self.in_flight.loss_scale = scale
        if not self.watcher.in_step or self.scales_apart:
            self.in_flight.sent_scale = scale

    @property
    def scales_apart(self) -> bool:
        """Whether GradScalers' scales may differ: local steps leave each alone with its overflows."""
        return bool(self.scaled) and any(group.shows_own_weights for group in self.groups)

    @override
    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        if isinstance(self._recipe.algorithm(), LocalSteps):
            raise RuntimeError(
                "an optimizer with local steps leaves no parameters out of a step: to agree on what to leave out takes "
                "a message, and local steps send none. Without a gradient on any rank they count as zero by themselves"
            )
        super().leave_out(parameters)

    # Weights

    @override
    def synchronize_weights(self) -> None:
        if self.watcher.in_step:
            raise RuntimeError("synchronize_weights() was called between backward() and step(): call step() first")
        for group in self.groups:
            group.meet(self.steps)

    @override
    def show_own_weights(self, own: bool) -> None:
        for group in self.groups:
            group.show_own_weights(own)

    # Checkpoints

    @override
    def rank_tensors(self) -> dict[str, Tensor]:
        """The rank's own residuals and, where local steps make state its own, that state."""
        found = {_LEFT_OUT_STEPS: torch.tensor([group.left_out_steps for group in self.groups], dtype=torch.int64)}
        for group in self.groups:
            own = group.local.own_state if group.local is not None and group.clock.frozen_at is not None else ()
            for bucket in group.buckets:
                for prefix, exchange in _with_residuals(group, bucket):
                    assert exchange.worker_residual is not None
                    for run in runs_in(bucket.layout, exchange.worker_place):
                        residual = exchange.worker_residual[run.place]
                        found[f"{prefix}{_WORKER_RESIDUAL}.{self.names[run.parameter]}"] = residual
                for kind in bucket.state.keys() & own:
                    for slot in bucket.layout.slots:
                        found[f"{kind}.{self.names[slot.parameter]}"] = bucket.state[kind][place_of(slot)]
        return found

    @override
    def counters(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "settings": {**self._recipe.settings, "codec": self._options.codec},
            "nodes": None,
            "step": self.steps,
            "loss_scale": self.loss_scale,
            "warmup_wire": self._options.warmup_wire,
            "freeze_groups": [
                {
                    "steps": group.clock.steps,
                    "frozen_at": group.clock.frozen_at,
                    "rule": None if group.rule is None else group.rule.state(),
                    "scalars": group.algorithm.scalars(self.names),
                    "buckets": None,
                }
                for group in self.groups
            ],
        }

    @override
    def check(self, source: SliceSource, nodes: Sequence[int] | None = None) -> None:
        """`nodes`: the node of each rank, if residuals belong to nodes."""
        saved = source.counters()
        for mine, settings in zip(self.in_flight.groups, saved["groups"], strict=True):
            if isinstance(source, OneRankState):  # whose settings are edited by hand
                self._recipe.check_group({**mine, **settings})
        held = dict(zip(self.names, self.parameters, strict=True))
        trained, filled = set[str](), set[str]()
        for name, one in held.items():
            trained |= {name} if one.requires_grad or not self.grows else set()
            filled |= {name} if one.numel() else set()
        if "weight" in source.kinds():
            check_weights(source, trained, map(held.__getitem__, trained))
        ranks = ranks_to_resume(source, self.comm, nodes)
        for number, group in enumerate(saved["freeze_groups"]):
            buckets = group["buckets"]
            placed = trained if buckets is None else set(chain.from_iterable(buckets))
            if strangers := placed - held.keys():
                raise DamagedStateError(f"{min(strangers)!r} of freeze group {number} is no parameter here")
            self._check_group(source, group, placed & filled, ranks, by_node=nodes is not None)

    def _check_group(
        self,
        source: SliceSource,
        saved: Mapping[str, Any],
        names: Iterable[str],
        ranks: Sequence[int] | None,
        *,
        by_node: bool,
    ) -> None:
        """Raise DamagedStateError unless all state was saved that `_load_group` reads of these parameters."""
        algorithm = self.groups[0].algorithm if self.groups else self._recipe.algorithm()
        form = algorithm.form
        if missing := algorithm.scalars(self.names).keys() - saved["scalars"].keys():
            raise DamagedStateError(f"it lacks what this optimizer goes on from: {min(missing)}")
        frozen, local = saved["frozen_at"] is not None, isinstance(algorithm, LocalSteps)
        kinds = set((frozen and algorithm.frozen_state) or algorithm.state)
        codes = set[str]()
        of_rank, own, own_state = set[str](), None, frozenset[str]()
        if frozen and isinstance(algorithm, LocalSteps):
            own, own_state = ranks_with_state(source, self.comm), algorithm.own_state
            kinds -= own_state if own is not None else set()
        if ranks is not None and (frozen or local):
            # Of a state_dict, and of a node, a rank has those of some elements.
            of_rank |= set() if by_node else {_WORKER_RESIDUAL}
            kinds |= set() if isinstance(source, OneRankState) else {_OWNER_RESIDUAL}
        wires = {self._options.warmup_wire, source.counters().get("warmup_wire")}
        if ranks is not None and not frozen and wires <= {*COMPRESSED_WIRES}:
            of_rank |= set() if by_node else {_WARMUP + _WORKER_RESIDUAL}
            two_legs = local or saved["buckets"] is not None  # else owners sent weights
            kinds |= {_WARMUP + _OWNER_RESIDUAL} if two_legs and not isinstance(source, OneRankState) else set()
        if frozen and PACKED_PRECONDITIONER in source.kinds():
            kinds -= {form.momentum, form.denominators or ""}
            kinds |= {PACKED_MOMENTUM, PRECONDITIONER_LOW, PRECONDITIONER_HIGH}
            codes = {PACKED_PRECONDITIONER}
        owned = () if self._options.owned is None else map(self.names.__getitem__, self._options.owned.shapes)
        steps_come_back = frozenset(owned)
        for name in names:
            for kind in (kinds - {_WARMUP + _OWNER_RESIDUAL} if name in steps_come_back else kinds) | codes:
                check_saved(source, kind, name, codes=kind in codes)
            for rank, kind in chain(product(ranks or (), of_rank), product(own or (), own_state)):
                if f"{kind}.{name}" not in source.rank_keys(rank):
                    raise DamagedStateError(
                        f"it lacks what this optimizer goes on from: {kind} of {name!r} of rank {rank}"
                    )

    def _load_groups(
        self, source: SliceSource, saved: Sequence[Mapping[str, Any]], nodes: Sequence[int] | None = None
    ) -> None:
        """Take over what was `saved` of `groups`, which are laid out as they were; `nodes`: the node of each rank, if
        residuals belong to nodes. Residuals that cannot be had start from zero, with a warning."""
        local = bool(self.groups) and self.groups[0].local is not None
        always = local or self._options.warmup_wire in COMPRESSED_WIRES
        compresses = any(always or group["frozen_at"] is not None for group in saved)
        ranks = ranks_to_resume(source, self.comm, nodes)
        if ranks is None and compresses:
            warn_of_lost_residuals(source, self.comm)
        ranks = ranks if compresses else None
        own = ranks_with_state(source, self.comm) if local else ranks
        for group, of_group in zip(self.groups, saved, strict=True):
            _load_group(group, self.names, of_group, source, ranks, own)
        if ranks == [self.comm.rank] and _LEFT_OUT_STEPS in source.rank_keys(self.comm.rank):
            left_out = source.read_rank(_LEFT_OUT_STEPS, self.comm.rank).tolist()
            for group, steps in zip(self.groups, left_out, strict=False):  # sharded state has one group
                group.left_out_steps = steps


def check_in_sync(in_sync: bool) -> None:
    """Raise RuntimeError where ranks hold different weights."""
    if not in_sync:
        raise RuntimeError(
            "ranks hold different weights between two syncs: call optimizer.synchronize_weights() on every rank before "
            "you read or set them"
        )


def ranks_to_resume(source: SliceSource, comm: Communicator, nodes: Sequence[int] | None) -> list[int] | None:
    """`ranks_of_residuals`; None too if one of them is not in `source`."""
    return None if ranks_of_residuals(source, comm, nodes) is None else ranks_with_state(source, comm)


def ranks_with_state(source: SliceSource, comm: Communicator) -> list[int] | None:
    """The ranks whose own state this one goes on with, on whatever nodes: its own, or of another number of ranks all;
    None if one of them is not in `source`."""
    ranks = [comm.rank] if source.world_size == comm.size else list(range(source.world_size))
    return None if any(TRAFFIC not in source.rank_keys(rank) for rank in ranks) else ranks


def slices(group: FreezeGroup, names: Sequence[str], rank: int, *, alone: bool = False) -> list[SavedSlice]:
    """The share of `rank` of what all ranks hold, what it keeps as an owner, and the residual that it owns; or `alone`
    all of it, with zeros where others own a residual."""
    found: list[SavedSlice] = []
    own_weights = group.local is not None and group.clock.frozen_at is not None
    for bucket in group.buckets:
        first = rank * bucket.layout.shard
        own = slice(0, bucket.layout.numel) if alone else slice(first, first + bucket.layout.shard)
        state = group.storage.saved_state(bucket, own)
        for run in runs_in(bucket.layout, own):
            values = {name: one[run.place] for name, one in state.items()}
            for kind, one in (values | group.storage.saved(bucket, run, own_weights)).items():
                found.append(SavedSlice(kind, names[run.parameter], run.start, one))
        for prefix, exchange in _with_residuals(group, bucket):
            if (residual := exchange.owner_residual) is not None:
                kind, place = prefix + _OWNER_RESIDUAL, exchange.owner_place
                if alone:
                    whole, place = residual.new_zeros(exchange.padded_numel), exchange.worker_place
                    whole[exchange.owner_place] = residual
                    residual = whole
                for run in runs_in(bucket.layout, place):
                    found.append(SavedSlice(kind, names[run.parameter], run.start, residual[run.place]))
    return found


def _with_residuals(group: FreezeGroup, bucket: Bucket) -> list[tuple[str, Exchange]]:
    """The exchanges that keep residuals from step to step, and what those are called by in a checkpoint."""
    found = [("", bucket.compressed)] if group.local is not None or group.clock.frozen_at is not None else []
    if bucket.rounds_averages:
        scale_residuals(bucket, 1.0)  # of plain gradients; scales are powers of 2, so that nothing is lost
        assert bucket.averaging is not None
        found.append((_WARMUP, bucket.averaging))
    return found


def check_settings(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raise ValueError where `saved` settings would give momenta and residuals another meaning."""
    for setting, value in mine.items():
        if setting in saved and saved[setting] != value:
            raise ValueError(
                f"this state was saved with {setting}={saved[setting]!r}; this optimizer has {setting}={value!r}. "
                "Build it with the same"
            )


def be_as_far(group: FreezeGroup, names: Sequence[str], saved: Mapping[str, Any]) -> None:
    """Take over what counters have `saved` of a freeze group: all but what tensors hold."""
    group.clock.steps = saved["steps"]
    rule = group.rule
    if rule is not None and saved["rule"] and saved["rule"].keys() == rule.state().keys():
        rule.load(saved["rule"])  # else freeze_step was changed: the new rule starts afresh
    group.algorithm.load_scalars(saved["scalars"], names)
    if saved["frozen_at"] is not None and group.clock.frozen_at is None:
        group.storage.begin_frozen_state()
    group.clock.frozen_at = saved["frozen_at"]


def _load_group(
    group: FreezeGroup,
    names: Sequence[str],
    saved: Mapping[str, Any],
    source: SliceSource,
    ranks: Sequence[int] | None,
    own: Sequence[int] | None,
) -> None:
    """Take over a freeze group whose buckets are laid out already; KeyError where state was not saved.

    `ranks`, `own`: whose residuals and whose own state to take the mean of, the averages that the next exchange makes
    of which are what they would have been; None where they cannot be had.
    """
    be_as_far(group, names, saved)
    for bucket in group.buckets:
        group.storage.load_state(bucket, names, source, own)
    group.restore()
    for bucket in group.buckets if ranks is not None else ():
        for prefix, exchange in _with_residuals(group, bucket):
            if not prefix or source.counters().get("warmup_wire") in COMPRESSED_WIRES:
                _load_residuals(bucket, exchange, prefix, names, source, ranks or ())


def _load_residuals(
    bucket: Bucket, exchange: Exchange, prefix: str, names: Sequence[str], source: SliceSource, ranks: Sequence[int]
) -> None:
    """Take over an owner's residual, if there are such, and the mean of what `ranks` saved as their own; KeyError where
    one did not.

    The average over ranks of payload + residual, which is what every rank receives, is then what it would have been.
    """
    worker, owner = exchange.worker_residual, exchange.owner_residual
    assert worker is not None
    for run in runs_in(bucket.layout, exchange.worker_place):
        mean = mean_over_ranks(source, f"{prefix}{_WORKER_RESIDUAL}.{names[run.parameter]}", ranks)
        worker[run.place].copy_(mean[run.start : run.start + run.numel] if len(mean) != run.numel else mean)
    if owner is not None and (not prefix or prefix + _OWNER_RESIDUAL in source.kinds()):
        lost = owner.clone()  # as packets were cut anew
        for run in runs_in(bucket.layout, exchange.owner_place):
            owner[run.place].copy_(source.read(prefix + _OWNER_RESIDUAL, names[run.parameter], run.start, run.numel))
        if lost.any():
            owner.add_(lost)
    if bucket.zero_variance is not None and not prefix:
        hold_zero(exchange, bucket.zero_variance)
