"""What both sharded homes of algorithms have in common: one freeze group, counters that cross homes, and replicas that
are compared and taken from the master weights again."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.compress.exchange import Exchange
from thinwire.optim.algorithm import AdamSettings, Algorithm, Clock, LocalSteps
from thinwire.optim.checkpoint import check_settings, ranks_to_resume
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.optim.home import AlgorithmHome
from thinwire.optim.options import HomeOptions, Recipe, check_same_freeze
from thinwire.optim.step import StepUnderWay, clip_by_sketch, hear
from thinwire.zero.norm_sketch import NormSketch, read_together
from thinwire.zero.rank_state import OneRankState
from thinwire.zero.saved_state import SliceSource
from thinwire.zero.sharded_home import ShardedHome, Vote
from thinwire.zero.sharded_parameters import ShardedParameters

__all__ = ["AlgorithmShardedHome", "ShardAgreement"]


class AlgorithmShardedHome(ShardedHome, AlgorithmHome):
    """An algorithm's parameters, all of which entered together."""

    def __init__(
        self,
        parameters: ShardedParameters,
        options: HomeOptions,
        recipe: Recipe,
        make_rule: Callable[[], FreezeRule | None],
    ) -> None:
        super().__init__(parameters)
        self._options = options
        self._recipe = recipe
        self._make_rule = make_rule
        self._begin_again()
        self._sketch = NormSketch(parameters.exchange_comm, parameters.device) if options.clips_to else None
        self._under_way = StepUnderWay(parameters.groups, divide_first=options.averaging.divide_first)
        options.averaging.prepare(self.parameters)
        self._loss_scale = 1.0
        self._norm = math.nan  # of the averaged gradient, times the loss scale, where a sketch found it
        self._watcher.follow(lambda: not self._scales_apart)

    @property
    @override
    def algorithms(self) -> list[Algorithm]:
        return [self._algorithm]

    @property
    @override
    def steps(self) -> int:
        return self._clock.steps

    @property
    @override
    def frozen(self) -> bool:
        return self._clock.frozen

    @property
    @override
    def frozen_at(self) -> int | None:
        return self._clock.frozen_at

    @property
    @override
    def in_sync(self) -> bool:
        return not isinstance(self._algorithm, LocalSteps) or self._algorithm.in_sync

    # One step

    @property
    def loss_scale(self) -> float:
        """What gradients are times."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._loss_scale = scale
        if not self._watcher.in_step:
            self._under_way.loss_scale = scale

    @property
    @abstractmethod
    def _sends_payloads(self) -> bool:
        """Whether this step sends what an algorithm makes of gradients, and not the gradients."""

    @property
    def _scales_apart(self) -> bool:
        """Whether GradScalers' scales may differ: local steps leave each alone with its overflows."""
        return bool(self.scaled) and isinstance(self._algorithm, LocalSteps) and self._clock.frozen

    def _begin_step(self) -> Vote:
        if self._scales_apart:
            self._under_way.loss_scale = self._loss_scale
        vote = super()._begin_step()
        if vote.finite and self._under_way.loss_scale != self._loss_scale and self._sends_payloads:
            # They left as if gradients were times the scale before. It changes rarely, and alike on every rank;
            # nothing is committed yet, so all is simply sent again.
            self._under_way.loss_scale = self._loss_scale
            self._under_way.begin_sending()
            self._vote = None
            self._watcher.send_again()
            vote = self._finish()
        self._under_way.loss_scale = self._loss_scale
        return vote

    def _end_step(self) -> None:
        super()._end_step()
        if self._sketch is not None:
            self._sketch.begin(self.steps)
        self._under_way.begin()
        self._under_way.number = self.steps
        # A GradScaler has to see them, and may change its scale: then they are sent again.
        self._under_way.frees_gradients = self.scaled is False

    def _clip_by_sketch(self) -> None:
        clip_by_sketch(self._under_way, self._options.clips_to, self._loss_scale)

    def _hear(self, exchanges: Iterable[Exchange]) -> None:
        """Bring to the host what packets' headers, and the sketch, have said."""
        norm = hear(self._under_way, exchanges)
        if norm is not None:
            self._norm = norm

    @override
    def drop(self) -> None:
        super().drop()
        if self._sketch is not None:
            self._sketch.begin(self.steps)

    # Checkpoints

    @override
    def counters(self) -> dict[str, Any]:
        """As a replicated home's, with one freeze group."""
        group = {
            "steps": self._clock.steps,
            "frozen_at": self._clock.frozen_at,
            "rule": None if self._rule is None else self._rule.state(),
            "scalars": self._algorithm.scalars(self._parameters.names),
            "buckets": None,
        }
        return {
            "names": list(self._parameters.names),
            "settings": {**self._recipe.settings, "codec": "sign1", "block_size": self._options.block_size},
            "nodes": None,
            "step": self._clock.steps,
            "loss_scale": self.loss_scale,
            "freeze_groups": [group],
        }

    def _check_saved(self, saved: Mapping[str, Any]) -> dict[str, Any] | None:
        """The saved freeze group, None where a run had not begun; raises ValueError where it cannot go on here."""
        check_settings(saved["settings"], self._recipe.settings)
        groups = saved["freeze_groups"]
        if len({(group["steps"], group["frozen_at"]) for group in groups}) > 1:
            raise ValueError(
                "this state has parameters that entered later and freeze on their own, which sharded state cannot do: "
                "load it at stage 0"
            )
        return {**groups[0], "scalars": _merged(groups)} if groups else None

    def _load_counters(self, saved: Mapping[str, Any]) -> None:
        """Take over where a run was."""
        group = self._check_saved(saved)
        self.reset_state()
        if group is not None:
            self._clock.steps = group["steps"]
            self._clock.frozen_at = group["frozen_at"]
            self._algorithm.load_scalars(group["scalars"], self._parameters.names)
            # Else freeze_step was changed: the new rule starts afresh.
            if self._rule is not None and group["rule"] and group["rule"].keys() == self._rule.state().keys():
                self._rule.load(group["rule"])

    def _ranks_to_resume(self, source: SliceSource) -> list[int] | None:
        """The ranks whose own tensors this one goes on with; None where they cannot be had."""
        saved_by = f"rank {source.rank}" if isinstance(source, OneRankState) else "a job"
        compresses = self._clock.frozen or isinstance(self._algorithm, LocalSteps)
        return ranks_to_resume(source, self.comm, None, saved_by, compresses)

    def _load_weights_of(self, source: SliceSource) -> None:
        """Take the weights over where they were saved; else the parameters have them, and the source the masters."""
        if "weight" in source.kinds():
            self._parameters.load_weights(source)
            return
        for masters in self._parameters.masters:
            for run, view in zip(masters.runs, masters.views, strict=True) if masters.separate else ():
                view.copy_(source.read("master", self._parameters.names[run.parameter], run.start, run.numel))
        self._parameters.accept_written()

    # Parts

    def _begin_again(self) -> None:
        """Be at step 0."""
        self._algorithm = self._recipe.algorithm()
        self._rule = self._make_rule()
        self._clock = Clock(frozen_at=None if self._algorithm.freezes else 0)

    def _settings(self, group: int) -> AdamSettings:
        return self._recipe.hyperparameters.of_group(dict(self._parameters.groups[group]))

    def _settings_of(self, parameter: int) -> AdamSettings:
        return self._settings(self._parameters.order.group_of[parameter])

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._parameters.groups]

    def _has_ended_warmup(self, variance_norms: Callable[[], list[float]]) -> bool:
        """Whether the step that was counted last is the last one before the freeze. Collective."""
        if self._rule is None or self._clock.frozen:
            return False
        reached = self._rule.reached(self._clock.steps, self._rates(), variance_norms)
        if self._rule.looks_at(self._clock.steps):
            check_same_freeze(self._parameters.exchange_comm, reached, self._rates())
        return reached


class ShardAgreement:
    """An Agreement on sums over shards."""

    def __init__(self, parameters: ShardedParameters, settings: Callable[[], Mapping[int, AdamSettings]]) -> None:
        """`settings`: of every parameter that takes part, by number."""
        self._comm = parameters.exchange_comm
        self._device = parameters.device
        self._settings = settings
        self.numels = [parameter.numel() for parameter in parameters.order.parameters]

    @property
    def settings(self) -> Mapping[int, AdamSettings]:
        """See Agreement."""
        return self._settings()

    def zeros(self, kinds: int) -> Tensor:
        """See Agreement."""
        return torch.zeros(len(self.numels), kinds, dtype=torch.float64, device=self._device)

    def __call__(self, sums: Tensor, greatest: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See Agreement."""
        adding = self._comm.all_reduce(sums, async_op=True)
        if greatest is None:
            greatest = sums.new_zeros(())
        else:
            greatest = greatest.contiguous()
            self._comm.all_reduce(greatest, "max")
        adding.wait()
        sums, greatest = read_together([sums, greatest])
        return sums, greatest


def _merged(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The scalars of several freeze groups, of which each has other parameters."""
    merged: dict[str, Any] = {}
    for group in groups:
        for name, value in group["scalars"].items():
            merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return merged
