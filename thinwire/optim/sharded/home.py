"""The sharded home of algorithms: one freeze group of parameters in flat buckets, whose state a storage holds, whole or
packed; counters that cross homes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from typing_extensions import override

from thinwire.optim.algorithm import Algorithm
from thinwire.optim.checkpoint import check_settings, counters
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.optim.home import AlgorithmHome, check_may_leave_out
from thinwire.optim.options import HomeOptions, Recipe
from thinwire.optim.sharded.packed import PackedStorage
from thinwire.optim.sharded.storage import ShardedRun, Storage
from thinwire.optim.sharded.whole import WholeStorage
from thinwire.zero.home import NO_GRADIENTS, StepResult
from thinwire.zero.master_weights import ShardedParameters
from thinwire.zero.saved_state import SavedSlice, SliceSource
from thinwire.zero.sharded_home import NOT_FINITE, ShardedHome, StateOfBuckets, Vote

__all__ = ["AlgorithmShardedHome"]


class AlgorithmShardedHome(ShardedHome, AlgorithmHome):
    """An algorithm's parameters, all of which entered together, at ZeRO stages 1 and 2."""

    def __init__(
        self,
        parameters: ShardedParameters,
        options: HomeOptions,
        recipe: Recipe,
        make_rule: Callable[[], FreezeRule | None],
    ) -> None:
        super().__init__(parameters)
        self._recipe = recipe
        self._run = ShardedRun(parameters, options, recipe, make_rule, self.watcher, self._vote_on_averages)
        options.averaging.prepare(self.parameters)
        self._loss_scale = 1.0
        self._storage = _storage_of(self._run)

    @property
    @override
    def algorithms(self) -> list[Algorithm]:
        return [self._run.algorithm]

    @property
    @override
    def steps(self) -> int:  # type: ignore[override]
        return self._run.clock.steps

    @property
    @override
    def frozen(self) -> bool:
        return self._run.clock.frozen

    @property
    @override
    def frozen_at(self) -> int | None:  # type: ignore[override]
        return self._run.clock.frozen_at

    @property
    @override
    def in_sync(self) -> bool:  # type: ignore[override]
        return self._run.local is None or self._run.local.in_sync

    @property
    @override
    def left_out_steps(self) -> int:
        return self._storage.left_out_steps

    # One step

    @property
    def loss_scale(self) -> float:
        """What gradients are times."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._loss_scale = scale
        if not self.watcher.in_step:
            self._run.step.loss_scale = scale

    @override
    def step(self) -> StepResult:
        vote = self._begin_step()
        applied = self._storage.applies(vote)
        if applied:
            self._run.scaled = bool(self.scaled)
            self._storage.apply(vote)
        norm = self._run.step.norm / self.loss_scale if vote.finite else math.inf
        self._end_step()
        return StepResult(applied, norm, "" if applied else NO_GRADIENTS if vote.finite else NOT_FINITE)

    @property
    def _scales_apart(self) -> bool:
        """Whether GradScalers' scales may differ: local steps leave each alone with its overflows."""
        return bool(self.scaled) and self._run.local is not None and self._run.clock.frozen

    @override
    def _find_vote(self) -> Vote:
        return self._storage.vote()

    @override
    def _begin_step(self) -> Vote:
        step = self._run.step
        if self._scales_apart:
            step.loss_scale = self._loss_scale
        vote = super()._begin_step()
        if vote.finite and step.loss_scale != self._loss_scale and self._storage.sends_payloads:
            # They left as if gradients were times the scale before. It changes rarely, and alike on every rank;
            # nothing is committed yet, so all is simply sent again.
            step.loss_scale = self._loss_scale
            step.begin_sending()
            self._vote = None
            self.watcher.send_again()
            vote = self._finish()
        step.loss_scale = self._loss_scale
        return vote

    @override
    def _end_step(self) -> None:
        super()._end_step()
        self._run.begin_step()
        self._storage.prepare()
        self.watcher.held_back = self._scales_apart
        # A GradScaler has to see them, and may change its scale: then they are sent again.
        self._run.step.frees_gradients = self.scaled is False

    @override
    def drop(self) -> None:
        super().drop()
        if self._run.sketch is not None:
            self._run.sketch.begin(self.steps)

    @override
    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        check_may_leave_out(self._run.algorithm)
        super().leave_out(parameters)

    @override
    def synchronize_weights(self) -> None:
        self._storage.synchronize_weights()

    @override
    def show_own_weights(self, own: bool) -> None:
        self._storage.show_own_weights(own)

    @override
    def _state_of_buckets(self) -> StateOfBuckets:
        return self._storage

    # Checkpoints

    @override
    def saved_slices(self) -> list[SavedSlice]:
        return self._storage.slices()

    @override
    def rank_tensors(self) -> dict[str, Tensor]:
        return self._storage.rank_tensors()

    @override
    def counters(self) -> dict[str, Any]:
        """As a replicated home's, with one freeze group."""
        run, names = self._run, self._parameters.names
        wire = {"codec": run.options.codec, "block_size": run.options.block_size}
        return {
            "names": list(names),
            "settings": {**self._recipe.settings, **wire},
            "nodes": None,
            "step": self.steps,
            "loss_scale": self.loss_scale,
            "freeze_groups": [{**counters(run.clock, run.rule, run.algorithm, names), "buckets": None}],
            **self._storage.counters(),
        }

    @override
    def load(self, source: SliceSource) -> None:
        saved = source.counters()
        group = _check_saved(saved, self._recipe.settings)
        self.reset_state()
        _load_weights_of(self._parameters, source)
        self._storage.load(saved, group, source)
        self._run.begin_step()
        self._storage.prepare()
        self.watcher.held_back = bool(self.scaled) and self._run.local is not None

    @override
    def load_weights(self, source: SliceSource) -> None:
        """Local progress is dropped: all ranks hold what was saved."""
        super().load_weights(source)
        self._storage.weights_loaded()

    @override
    def reset_state(self) -> None:
        """The weights are those of the last sync."""
        self._storage.release()
        self._run.begin_again()
        self._storage = _storage_of(self._run)

    @override
    def model_state_bytes(self) -> dict[str, float]:
        return self._storage.model_state_bytes()


def _storage_of(run: ShardedRun) -> Storage:
    """State as at step 0."""
    return PackedStorage(run) if run.algorithm.form.packs else WholeStorage(run)


def _check_saved(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any] | None:
    """The saved freeze group, None where a run had not begun; raises ValueError where it cannot go on here."""
    check_settings(saved["settings"], mine)
    groups = saved["freeze_groups"]
    if len({(group["steps"], group["frozen_at"]) for group in groups}) > 1:
        raise ValueError(
            "this state has parameters that entered later and freeze on their own, which sharded state cannot do: "
            "load it at stage 0"
        )
    return {**groups[0], "scalars": _merged(groups)} if groups else None


def _load_weights_of(parameters: ShardedParameters, source: SliceSource) -> None:
    """Take the weights over where they were saved; else the parameters have them, and the source the masters."""
    if "weight" in source.kinds():
        parameters.load_weights(source)
        return
    for masters in parameters.masters:
        for run, view in zip(masters.runs, masters.views, strict=True) if masters.separate else ():
            view.copy_(source.read("master", parameters.names[run.parameter], run.start, run.numel))
    parameters.accept_written()


def _merged(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The scalars of several freeze groups, of which each has other parameters."""
    merged: dict[str, Any] = {}
    for group in groups:
        for name, value in group["scalars"].items():
            merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return merged
