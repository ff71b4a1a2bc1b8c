"""The step in flight: what its buckets share, what they ask of their home, and what its exchanges and a sketched norm
have said, with one wait for an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.compress.exchange import Exchange, bring_headers
from thinwire.optim.algorithm import AdamSettings
from thinwire.zero import BucketLayout
from thinwire.zero.norm_sketch import NormSketch
from thinwire.zero.rank_checks import settings_digest
from thinwire.zero.sharded_home import clip_of_norm

__all__ = ["Exchanges", "Parameters", "StepUnderWay", "clip_by_sketch", "hear", "may_clip"]


class Exchanges(Protocol):
    """Makes what a bucket goes through."""

    ranks: int

    def exact(self, layout: BucketLayout, index: int, device: torch.device) -> Exchange:
        """An exact average."""

    def compressed(self, layout: BucketLayout, index: int, device: torch.device) -> Exchange:
        """One through the codec, with error feedback."""


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
class StepUnderWay:
    """What every bucket of a step shares.

    `number`: of steps that were sent. `loss_scale`: what gradients are taken to be times. `sketch`: where gradients are
    counted whose averaged norm is wanted before leg 2. `sketched`: that norm, before the host has it. `clip`: what they
    are multiplied by because of it, until then perhaps fp32 [] on an accelerator. `unplaced`: whether a trainable
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
    settings_sent: dict[int, AdamSettings] = field(default_factory=dict)
    frees_gradients: bool = False
    _digest: int | None = None

    def begin(self) -> None:
        """Forget what the last step has found and sent."""
        self.clip = 1.0
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


def clip_by_sketch(step: StepUnderWay, max_norm: float, loss_scale: float) -> None:
    """Between the legs: clip `step` by the averaged gradient's norm. Collective; on an accelerator nobody waits."""
    assert step.sketch is not None
    step.sketched = step.sketch.norm()
    step.clip = clip_of_norm(max_norm, step.sketched / loss_scale)


def hear(step: StepUnderWay, exchanges: Iterable[Exchange]) -> float | None:
    """Bring the headers of `exchanges` to the host, and `step`'s clip; return the norm, times the loss scale, that it
    was clipped by, once. None where there is none that was not returned."""
    sketched = [] if step.sketched is None else [step.sketched, torch.as_tensor(step.clip, dtype=torch.float64)]
    found = bring_headers(exchanges, sketched)
    if not found:
        return None
    norm, step.clip = map(float, found)
    step.sketched = None
    return norm
