"""fp16's loss scale: gradients too small for fp16 are multiplied up, and a scale that was too large is found out by
the overflow it causes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.engine.config.models import Fp16Config

_MANY = 20


class NonFiniteError(FloatingPointError):
    """A loss or a gradient is not finite, and no smaller loss scale can help. Raised on every rank; nothing moved."""


class FixedLossScale:
    """The same scale for ever; steps that overflow are skipped, with a warning where many do in a row."""

    dynamic = False

    def __init__(self, value: float) -> None:
        self.value = value
        self.iterations = 0
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
        self.iterations += 1
        self._overflows_in_a_row = self._overflows_in_a_row + 1 if overflow else 0
        if self._overflows_in_a_row == _MANY:
            warnings.warn(
                f"{_MANY} steps in a row overflowed in fp16 and were skipped, at the fixed loss scale {self.value:g}: "
                'lower it, or set "fp16.loss_scale" to 0 for a dynamic one',
                RuntimeWarning,
                stacklevel=4,
            )

    def state(self) -> dict[str, Any]:
        """How many steps were noted; the configuration says the rest."""
        return {"iterations": self.iterations}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.iterations = state.get("iterations", 0)


@dataclass(eq=False)
class DynamicLossScale:
    """Doubles after `window` steps in a row without an overflow, the first of which does not count;
    halves at overflows, the first `hysteresis` - 1 of which are let pass. What was let pass is forgiven when the scale
    doubles, or at every step without an overflow where `forgives_at_once`.

    At `minimum` it halves no more: `update` then raises NonFiniteError, or where `stays_at_minimum` lets steps be
    skipped for as long as it takes, with a warning where many are in a row.
    """

    dynamic = True

    value: float
    window: int
    hysteresis: int
    minimum: float
    forgives_at_once: bool = field(default=False, kw_only=True)
    stays_at_minimum: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._forbearance = self.hysteresis
        self.iterations = self._steps_without_overflow = self._overflows_at_minimum = 0

    def check(self, dtype: torch.dtype) -> None:
        """Any dtype: the scale goes down until it can hold it."""

    def update(self, overflow: bool) -> None:
        """Note whether a step's gradients overflowed."""
        self.iterations += 1
        if overflow:
            self._steps_without_overflow = 0
            self._shrink()
            return
        self._overflows_at_minimum = 0
        counted = self._steps_without_overflow
        self._steps_without_overflow += 1
        doubles = counted > 0 and counted % self.window == 0
        if doubles:
            self.value *= 2
        if doubles or self.forgives_at_once:
            self._forbearance = self.hysteresis

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "value": self.value,
            "forbearance": self._forbearance,
            "steps_without_overflow": self._steps_without_overflow,
            "iterations": self.iterations,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`; one of a fixed scale says little."""
        self.value = state.get("value", self.value)
        self._forbearance = min(state.get("forbearance", self.hysteresis), self.hysteresis)
        self._steps_without_overflow = state.get("steps_without_overflow", 0)
        self.iterations = state.get("iterations", 0)

    def _shrink(self) -> None:
        if self._forbearance > 1:
            self._forbearance -= 1
        elif self.value > self.minimum:
            self.value = max(self.value / 2, self.minimum)
        elif self.stays_at_minimum:
            self._overflows_at_minimum += 1
            if self._overflows_at_minimum == _MANY:
                warnings.warn(f"{_MANY} steps in a row were skipped: {self._too_large}", RuntimeWarning, stacklevel=5)
        else:
            raise NonFiniteError(self._too_large)

    @property
    def _too_large(self) -> str:
        return (
            f"gradients overflow in fp16 even at the smallest loss scale, {self.minimum:g}: they are too large or "
            "not finite whatever the scale. Look at the data and the learning rate, or train in bf16"
        )


LossScale = FixedLossScale | DynamicLossScale
"""What the loss is multiplied by before backward, `value` in the step to come, and how that follows from the outcome of
steps: `dynamic` if it does, after `iterations` steps that were noted, skipped ones included."""


def make_loss_scale(config: Fp16Config, stage: int) -> LossScale | None:
    """The scale that `config` describes; None where fp16 is off, so that nothing is scaled.

    At ZeRO stage 0 the first overflow halves the scale, unless the configuration says otherwise, and the smallest scale
    is no error.
    """
    if not config.enabled:
        return None
    if config.loss_scale:
        return FixedLossScale(config.loss_scale)
    of_stage = 1 if stage == 0 else 2
    return DynamicLossScale(
        2.0**config.initial_scale_power,
        config.loss_scale_window,
        of_stage if config.hysteresis is None else config.hysteresis,
        config.min_loss_scale,
        forgives_at_once=config.consecutive_hysteresis,
        stays_at_minimum=stage == 0,
    )
