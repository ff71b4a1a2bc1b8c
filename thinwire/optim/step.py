"""The step in flight: what its buckets share and ask of their home, and what its packets and a sketched norm said."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.exchange import Exchange, bring_headers
from thinwire.compress.packet import SettingsError
from thinwire.compress.parts import Outcome
from thinwire.optim.algorithm import AdamSettings
from thinwire.zero.norm_sketch import NormSketch
from thinwire.zero.rank_checks import check_same_on_every_rank, settings_digest
from thinwire.zero.sharded_home import clip_of_norm

__all__ = ["Parameters", "Step", "clip_by_sketch", "may_clip", "read_outcomes"]


class Parameters(Protocol):
    """An optimizer's parameters by number, with their groups."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """By number."""

    def group_number(self, index: int) -> int:
        """Which parameter group one is in."""

    def settings(self, group: int) -> AdamSettings:
        """The hyperparameters of a parameter group now."""

    def mask(self, group: int) -> Tensor | None:
        """A parameter group's `exp_avg_mask`, if it has one."""

    def describe(self, index: int) -> str:
        """How an error message calls a parameter."""


@dataclass
class Step:
    """One step in flight, which all of its buckets share.

    `number`: of steps that were sent. `loss_scale`: what gradients are taken to be times. `sketch`: where gradients are
    counted whose averaged norm is wanted before leg 2. `sketched`: that norm, before the host has it. `clip`: what they
    are multiplied by because of it, until then perhaps fp32 [] on an accelerator. `norm`: of the averaged gradient,
    times the loss scale; NaN where it was not found. `unplaced`: whether a trainable
    parameter lies in no bucket yet. `divide_first`: what gradients that are averaged exactly are divided by before they
    leave. `settings_sent`: by parameter group, those that payloads depend on. `frees_gradients`: let each gradient go
    once it is in the payload, so that it cannot be sent again. `groups`: the parameter groups.
    """

    groups: Sequence[Mapping[str, Any]]
    unplaced: Callable[[], bool] = lambda: False
    number: int = 0
    divide_first: float = 1.0
    loss_scale: float = 1.0
    sketch: NormSketch | None = None
    sketched: Tensor | None = None
    clip: float | Tensor = 1.0
    norm: float = math.nan
    settings_sent: dict[int, AdamSettings] = field(default_factory=dict)
    frees_gradients: bool = False
    _digest: int | None = None

    def begin(self) -> None:
        """Forget what the last step has found and sent."""
        self.clip = 1.0
        self.norm = math.nan
        self.sketched = None
        self.begin_sending()

    def begin_sending(self) -> None:
        """Forget what was sent."""
        self.settings_sent = {}
        self._digest = None

    @property
    def settings(self) -> int:
        """A digest of the hyperparameters as they are when the first bucket leaves, which all others send too."""
        if self._digest is None:
            self._digest = settings_digest(self.groups, self.number)
        return self._digest


def may_clip(clip: float | Tensor) -> bool:
    """Whether a clip changes gradients, as far as the host knows."""
    return isinstance(clip, Tensor) or clip < 1.0


def clip_by_sketch(step: Step, max_norm: float, loss_scale: float) -> None:
    """Between the legs: clip `step` by the averaged gradient's norm. Collective; on an accelerator nothing waits."""
    assert step.sketch is not None
    step.sketched = step.sketch.norm()
    step.clip = clip_of_norm(max_norm, step.sketched / loss_scale)


class Sent(Protocol):
    """A bucket whose legs are over."""

    @property
    def sent(self) -> Exchange | None:
        """What this step went through; None if nothing was sent."""

    def outcome(self) -> Outcome:
        """What the headers said, the same on every rank."""


def read_outcomes(step: Step, comm: Communicator, buckets: Sequence[Sent]) -> Outcome:
    """Copy the headers of `buckets` to the host, with `step`'s norm and clip if a sketch found them, in one wait;
    return what they said together.

    If packets say that ranks have other hyperparameters, raises ValueError, on every rank, that names the first;
    collective only then.
    """
    sketched = [] if step.sketched is None else [step.sketched, torch.as_tensor(step.clip, dtype=torch.float64)]
    finite, incomplete, unplaced = True, False, False
    try:
        if found := bring_headers([one.sent for one in buckets if one.sent is not None], sketched):
            step.norm, step.clip = map(float, found)
            step.sketched = None
        for bucket in buckets:
            if bucket.sent is not None:
                outcome = bucket.outcome()
                finite &= outcome.finite
                incomplete |= outcome.incomplete
                unplaced |= outcome.unplaced
    except SettingsError:
        check_same_on_every_rank(comm, [], step.groups, {})
        raise
    return Outcome(finite, incomplete, unplaced)
