"""The base of both homes of algorithms, and the errors that both raise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.optim import checkpoint
from thinwire.optim.algorithm import Algorithm, LocalSteps
from thinwire.optim.checkpoint import LEFT_OUT_STEPS, ranks_to_resume, saved_by
from thinwire.optim.freeze_group import FreezeGroup
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.optim.options import HomeOptions, Recipe
from thinwire.optim.step import Clock, Step
from thinwire.zero.home import Home
from thinwire.zero.saved_state import SliceSource


class AlgorithmHome(Home):
    """A Home in which an algorithm lives.

    `groups`: the freeze groups, in the order in which they entered. `in_flight`: the step that their buckets share.
    """

    groups: list[FreezeGroup]
    in_flight: Step
    _recipe: Recipe
    _options: HomeOptions

    def _make_rule(self) -> FreezeRule | None:
        """Make the rule that ends the warmup of parameters that enter now."""
        return self._recipe.rule(max(group["betas"][1] for group in self.in_flight.groups))

    @property
    def algorithms(self) -> list[Algorithm]:
        """One for each freeze group."""
        return [group.algorithm for group in self.groups]

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
        found = {LEFT_OUT_STEPS: torch.tensor([group.left_out_steps for group in self.groups], dtype=torch.int64)}
        for group in self.groups:
            found |= checkpoint.rank_tensors(group, self.names)
        return found

    @override
    def counters(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "settings": {**self._recipe.settings, "codec": self._options.codec, "block_size": self._options.block_size},
            "nodes": None,
            "step": self.steps,
            "loss_scale": self.loss_scale,
            "freeze_groups": [{**checkpoint.counters(group, self.names), "buckets": None} for group in self.groups],
        }

    def _load_groups(
        self, source: SliceSource, saved: Sequence[Mapping[str, Any]], nodes: Sequence[int] | None = None
    ) -> None:
        """Take over what was `saved` of `groups`, which are laid out as they were; `nodes`: the node of each rank, if
        residuals belong to nodes. Residuals that cannot be had start from zero, with a warning."""
        local = isinstance(self._recipe.algorithm(), LocalSteps)
        compresses = any(local or group["frozen_at"] is not None for group in saved)
        ranks = ranks_to_resume(source, self.comm, nodes, saved_by(source), compresses)
        checkpoint.load(self.groups, self.names, saved, source, ranks)
        if ranks == [self.comm.rank]:
            with suppress(KeyError):  # saved by a home without local steps
                left_out = source.read_rank(LEFT_OUT_STEPS, self.comm.rank).tolist()
                for group, steps in zip(self.groups, left_out, strict=True):
                    group.left_out_steps = steps


def check_plain(algorithm: Algorithm, clock: Clock, kind: str) -> None:
    """Raise RuntimeError where state of this kind has another meaning, or other values on every rank, by now."""
    if clock.frozen and algorithm.frozen_state:
        raise RuntimeError(
            f"the optimizer has been frozen since step {clock.frozen_at}: what it keeps instead of {kind!r} is what "
            "compressed steps send and move by, no moment of the gradients. Read and set optimizer state before the "
            "freeze"
        )


def check_may_write(algorithm: Algorithm, clock: Clock, kind: str) -> None:
    """Raise RuntimeError where state of this kind cannot be written without other state that follows from it."""
    check_plain(algorithm, clock, kind)
    if isinstance(algorithm, LocalSteps) and algorithm.published:
        raise RuntimeError(
            f"{kind!r} of this optimizer cannot be set: it keeps {', '.join(algorithm.published)} beside it, found at "
            "an earlier step, which would not follow. Set weights, or load a checkpoint"
        )


def check_averages(exact: bool) -> None:
    """Raise RuntimeError unless the step in flight averages gradients."""
    if not exact:
        raise RuntimeError(
            "there is no averaged gradient: the optimizer's steps are compressed by now, and ranks send momenta "
            "instead of gradients. `.grad` holds this rank's own"
        )


def check_in_sync(in_sync: bool) -> None:
    """Raise RuntimeError where ranks hold different weights."""
    if not in_sync:
        raise RuntimeError(
            "ranks hold different weights between two syncs: call optimizer.synchronize_weights() on every rank before "
            "you read or set them"
        )
