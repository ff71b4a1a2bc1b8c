"""fp16's loss scale: gradients too small for fp16 are multiplied up, and a scale that was too large is found out by
the overflow it causes."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch

from thinwire.engine.config.models import Fp16Config
from thinwire.engine.errors import NonFiniteError

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScale", "make_loss_scale"]

_MANY = 20


class LossScale(Protocol):
    """What the loss is multiplied by before backward, and how that follows from the outcome of steps."""

    @property
    def value(self) -> float:
        """The scale of the step to come."""

    def check(self, dtype: torch.dtype) -> None:
        """Raise ValueError where no loss of this dtype can be scaled."""

    def update(self, overflow: bool) -> None:
        """Note whether a step's gradients overflowed. The same on every rank."""

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""


class FixedLossScale:
    """The same scale for ever; steps that overflow are skipped, with a warning where many do in a row."""

    def __init__(self, value: float) -> None:
        self.value = value
        self._overflows_in_a_row = 0

    def check(self, dtype: torch.dtype) -> None:
        """Raise ValueError for a scale that this dtype cannot hold: every gradient would overflow."""
        if self.value > torch.finfo(dtype).max:
            raise ValueError(
                f"the loss is {dtype}, which cannot hold the fixed loss scale {self.value:g}: return the loss in fp32 "
                '(loss.float()), or lower "fp16.loss_scale"'
            )

    def update(self, overflow: bool) -> None:
        """Note whether a step's gradients overflowed."""
        self._overflows_in_a_row = self._overflows_in_a_row + 1 if overflow else 0
        if self._overflows_in_a_row == _MANY:
            warnings.warn(
                f"{_MANY} steps in a row overflowed in fp16 and were skipped, at the fixed loss scale {self.value:g}: "
                'lower it, or set "fp16.loss_scale" to 0 for a dynamic one',
                RuntimeWarning,
                stacklevel=4,
            )

    def state(self) -> dict[str, Any]:
        """Nothing: the configuration says it all."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Nothing to continue."""


class DynamicLossScale:
    """Doubles after `window` steps in a row without an overflow; halves at overflows, the first `hysteresis` - 1 of
    which are let pass. What was let pass is forgiven when the scale doubles.

    `update` raises NonFiniteError where the scale would have to go below `minimum`.
    """

    def __init__(self, initial: float, window: int, hysteresis: int, minimum: float) -> None:
        self.value = initial
        self._window = window
        self._hysteresis = hysteresis
        self._minimum = minimum
        self._forbearance = hysteresis
        self._steps_without_overflow = 0

    def check(self, dtype: torch.dtype) -> None:
        """Any dtype: the scale goes down until it can hold it."""

    def update(self, overflow: bool) -> None:
        """Note whether a step's gradients overflowed."""
        if overflow:
            self._steps_without_overflow = 0
            self._shrink()
            return
        self._steps_without_overflow += 1
        if self._steps_without_overflow % self._window == 0:
            self.value *= 2
            self._forbearance = self._hysteresis

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "value": self.value,
            "forbearance": self._forbearance,
            "steps_without_overflow": self._steps_without_overflow,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`; one of a fixed scale says nothing."""
        self.value = state.get("value", self.value)
        self._forbearance = min(state.get("forbearance", self._hysteresis), self._hysteresis)
        self._steps_without_overflow = state.get("steps_without_overflow", 0)

    def _shrink(self) -> None:
        if self._forbearance > 1:
            self._forbearance -= 1
        elif self.value > self._minimum:
            self.value = max(self.value / 2, self._minimum)
        else:
            raise NonFiniteError(
                f"gradients overflow in fp16 even at the smallest loss scale, {self._minimum:g}: they are too large or "
                "not finite whatever the scale. Look at the data and the learning rate, or train in bf16"
            )


def make_loss_scale(config: Fp16Config) -> LossScale | None:
    """The scale that `config` describes; None where fp16 is off, so that nothing is scaled."""
    if not config.enabled:
        return None
    if config.loss_scale:
        return FixedLossScale(config.loss_scale)
    return DynamicLossScale(
        2.0**config.initial_scale_power, config.loss_scale_window, config.hysteresis, config.min_loss_scale
    )
