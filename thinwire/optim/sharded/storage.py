"""The storage of an algorithm's sharded state, as its home asks for it; and what both share: where the run is, its
parameters as buckets ask for them, sums over shards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.optim.algorithm import AdamSettings, Clock, LocalSteps
from thinwire.optim.checkpoint import ranks_to_resume
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.optim.home import check_may_write
from thinwire.optim.options import HomeOptions, Recipe
from thinwire.optim.step import Sent, Step, clip_by_sketch, read_outcomes
from thinwire.zero.backward import BackwardWatcher
from thinwire.zero.gradients import BucketGradients
from thinwire.zero.master_weights import ShardedParameters
from thinwire.zero.norm_sketch import NormSketch, read_together
from thinwire.zero.saved_state import OneRankState, SavedSlice, SliceSource
from thinwire.zero.sharded_home import StateOfBuckets, Vote

__all__ = ["ShardAgreement", "ShardedRun", "Storage"]


class ShardedRun:
    """Parameters, all of which entered together, and where their algorithm is.

    `scaled`: whether a GradScaler steps the optimizer.
    """

    def __init__(
        self,
        parameters: ShardedParameters,
        options: HomeOptions,
        recipe: Recipe,
        make_rule: Callable[[], FreezeRule | None],
        watcher: BackwardWatcher,
        vote_on_averages: Callable[[Sequence[BucketGradients]], Vote],
    ) -> None:
        """`watcher`: of the parameters' backwards. `vote_on_averages`: the vote on exact averages; collective."""
        self.sharded = parameters
        self.comm = parameters.exchange_comm
        self.options = options
        self.watcher = watcher
        self.vote_on_averages = vote_on_averages
        self.sketch = NormSketch(self.comm, parameters.device) if options.clips_to else None
        self.step = Step(parameters.groups, divide_first=options.averaging.divide_first)
        self.scaled = False
        self._recipe = recipe
        self._make_rule = make_rule
        self.begin_again()

    def begin_again(self) -> None:
        """Be at step 0."""
        self.algorithm = self._recipe.algorithm()
        self.local = self.algorithm if isinstance(self.algorithm, LocalSteps) else None
        self.rule = self._make_rule()
        self.clock = Clock(frozen_at=None if self.algorithm.freezes else 0)

    def begin_step(self) -> None:
        """Forget the last step; the next one is another."""
        if self.sketch is not None:
            self.sketch.begin(self.clock.steps)
        self.step.begin()
        self.step.number = self.clock.steps

    # The parameters, as buckets ask for them

    @property
    def parameters(self) -> Sequence[Tensor]:
        """By number."""
        return self.sharded.order.parameters

    def group_number(self, index: int) -> int:
        """Which parameter group a parameter is in."""
        return self.sharded.order.group_of[index]

    def settings(self, group: int) -> AdamSettings:
        """The hyperparameters of a parameter group now."""
        return self._recipe.hyperparameters.of_group(dict(self.sharded.groups[group]))

    def settings_of(self, parameter: int) -> AdamSettings:
        """Those of a parameter's."""
        return self.settings(self.group_number(parameter))

    def mask(self, group: int) -> Tensor | None:
        """A parameter group's `exp_avg_mask`, if it has one."""
        mask: Tensor | None = self.sharded.groups[group].get("exp_avg_mask")
        return mask

    def describe(self, index: int) -> str:
        """How an error message calls a parameter."""
        return self.sharded.order.describe(index)

    def rates(self) -> list[float]:
        """The learning rates of all parameter groups."""
        return [float(group["lr"]) for group in self.sharded.groups]

    # A step

    def clip_by_sketch(self) -> None:
        """Between the legs: clip by the averaged gradient's norm. Collective."""
        clip_by_sketch(self.step, self.options.clips_to, self.step.loss_scale)

    def read_headers(self, buckets: Sequence[Sent]) -> Vote:
        """The vote on what packets' headers, and the sketch, have said."""
        found = read_outcomes(self.step, self.sharded.comm, buckets)
        absent = self.watcher.left_out
        if found.incomplete:
            absent |= self.sharded.agree_on_absent(self.watcher.missing)
        return Vote(found.finite, self.step.norm, absent)

    def ranks_to_resume(self, source: SliceSource) -> list[int] | None:
        """The ranks whose own tensors this one goes on with; None where they cannot be had."""
        saved_by = f"rank {source.rank}" if isinstance(source, OneRankState) else "a job"
        compresses = self.clock.frozen or self.local is not None
        return ranks_to_resume(source, self.sharded.comm, None, saved_by, compresses)


class Storage(StateOfBuckets):
    """The state of a ShardedRun's algorithm, whole or packed. A home builds another to begin anew."""

    def __init__(self, run: ShardedRun) -> None:
        self.run = run

    @property
    @abstractmethod
    def sends_payloads(self) -> bool:
        """Whether this step sends what an algorithm makes of gradients, and not the gradients."""

    @abstractmethod
    def prepare(self) -> None:
        """Be ready for the kind of step that comes next."""

    @abstractmethod
    def vote(self) -> Vote:
        """What the ranks must know before a step is applied, once everything has arrived. Collective."""

    def applies(self, vote: Vote) -> bool:
        """Whether a step with this vote is applied."""
        return vote.finite and len(vote.absent) < len(self.run.parameters)

    @abstractmethod
    def apply(self, vote: Vote) -> None:
        """Apply a step. Collective."""

    @property
    def left_out_steps(self) -> int:
        """See AlgorithmHome."""
        return 0

    def synchronize_weights(self) -> None:
        """See Home."""

    def show_own_weights(self, own: bool) -> None:
        """See Home."""

    def weights_loaded(self) -> None:
        """Take over weights that a checkpoint brought into the parameters and their master weights."""

    def release(self) -> None:
        """Leave in the parameters the weights that all ranks have in common."""

    @override
    def check_may_write(self, kind: str) -> None:
        check_may_write(self.run.algorithm, self.run.clock, kind)

    # Checkpoints

    @abstractmethod
    def slices(self) -> list[SavedSlice]:
        """What this rank contributes of weights and state."""

    @abstractmethod
    def rank_tensors(self) -> dict[str, Tensor]:
        """What belongs to this rank alone."""

    def counters(self) -> dict[str, Any]:
        """What else a checkpoint holds, as plain values."""
        return {}

    @abstractmethod
    def load(self, saved: Mapping[str, Any], group: Mapping[str, Any] | None, source: SliceSource) -> None:
        """Take over state; the weights are there. `saved`: the counters, of which `group` are the freeze group's, None
        where a run had not begun."""

    @abstractmethod
    def model_state_bytes(self) -> dict[str, float]:
        """See Home."""


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
