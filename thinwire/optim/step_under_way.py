"""What the buckets of a step share, and what they ask of the home that they lie in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.compress.exchange import Exchange
from thinwire.optim.formulas import AdamSettings
from thinwire.zero import BucketLayout
from thinwire.zero.norm_sketch import NormSketch
from thinwire.zero.rank_checks import settings_digest

__all__ = ["Exchanges", "Parameters", "StepUnderWay"]


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
    counted whose averaged norm is wanted before leg 2. `clip`: what they are multiplied by because of it. `unplaced`:
    whether a trainable parameter lies in no bucket yet. `divide_first`: what gradients that are averaged exactly are
    divided by before they leave. `settings_sent`: by parameter group, those that payloads depend
    on. `frees_gradients`: let each gradient go once it is in the payload, so that it cannot be sent again. `groups`:
    the parameter groups.
    """

    groups: Sequence[Mapping[str, Any]]
    unplaced: Callable[[], bool] = lambda: False
    number: int = 0
    divide_first: float = 1.0
    loss_scale: float = 1.0
    sketch: NormSketch | None = None
    clip: float = 1.0
    settings_sent: dict[int, AdamSettings] = field(default_factory=dict)
    frees_gradients: bool = False
    _digest: int | None = None

    def begin(self) -> None:
        """Forget what the last step has found and sent."""
        self.clip = 1.0
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
