"""When 1-bit Adam freezes its variance: at a given step, or when the variance has settled.
The decision uses what is the same on every rank; the ranks compare it at every look all the same, since a learning
rate that differs would let one of them freeze alone."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.optim.step import AdamSettings


class FreezeRule(ABC):
    """Says after each warmup step whether it was the last one."""

    @abstractmethod
    def reached(self, step: int, learning_rates: Sequence[float], variance_norms: Callable[[], list[float]]) -> bool:
        """Whether to freeze after warmup step `step` (from 1 on); `variance_norms` computes the 1-norm of each
        parameter's bias-corrected v when called, in the same order at every step."""

    def looks_at(self, step: int) -> bool:
        """Whether the answer for `step` depends on more than the step: the ranks then compare theirs."""
        return False

    def state(self) -> dict[str, Any]:
        """Tell what a checkpoint must hold."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""


class FixedFreeze(FreezeRule):
    """Freeze after warmup step `freeze_step`."""

    def __init__(self, freeze_step: int) -> None:
        self._freeze_step = freeze_step

    @override
    def reached(self, step: int, learning_rates: Sequence[float], variance_norms: Callable[[], list[float]]) -> bool:
        return step >= self._freeze_step


class SettledVariance(FreezeRule):
    """Freeze once the learning rate has stopped rising and the variance has settled, and stays settled for a while.

    Tang et al. 2021 (1-bit Adam) freeze when ‖v_{t-Δ}‖₁ / ‖v_t‖₁ ≥ 0.96 with Δ = 1/(1-β₂), after the learning-rate
    warmup. Here v is bias-corrected, Δ = min(1/(1-β₂), t/5), at least 20, so that a run of a few hundred steps can
    freeze too, and growth is looked at tensor by tensor: embeddings are most of the total, and hide that all others
    have begun to move. Settled is the variance where a quarter of the tensors at most grow faster than as t², by a
    factor of (t/(t-Δ))², 1.56 up to t = 5/(1-β₂) and less from then on, but never less than the paper's 1/0.96. Steps
    that are then frozen are too long by T/t at most for most tensors at the end T of the run, where the learning rate
    is low. And a tenth of the tensors at most grow faster than as t⁴: where a transformer leaves a plateau, queries and
    keys, a fifth of its tensors, grow by a hundred while all others hardly do. A variance that shrinks only makes steps
    come out smaller: the median tensor's may by 15% over Δ, which a run whose loss goes to zero needs, and no more,
    which is how gradients fall before a first plateau. All this has to hold for min(1/(1-β₂), max(50, t/5)) steps.
    Tensors that have had no gradient do not count.
    """

    _LEAST_GROWTH_ALLOWED = 1 / 0.96
    _FASTEST_PACE = 1.25  # t/(t-Δ) while Δ is a fifth of t
    _GROWTH_ALLOWED = ((0.75, 2), (0.9, 4))  # so many of the tensors, and the power of t
    _MOST_SHRINKAGE = 0.85
    _EVERY = 10  # steps between two looks at the variance, each a pass over v and a device synchronisation
    _SHORTEST_DELTA = 20
    _SHORTEST_HOLD = 50
    _PART = 5
    _KEPT_IN_DELTA = 8  # looks that are remembered: many tensors have a number each in every one

    def __init__(self, beta2: float) -> None:
        self._memory = 1.0 / (1.0 - beta2)
        self._norms: dict[int, list[float]] = {}
        self._previous_rates: list[float] = []
        self._settled_since: int | None = None

    @override
    def reached(self, step: int, learning_rates: Sequence[float], variance_norms: Callable[[], list[float]]) -> bool:
        rising = any(now > before for now, before in zip(learning_rates, self._previous_rates, strict=False))
        self._previous_rates = list(learning_rates)
        if rising:
            self._settled_since = None
        if step % self._EVERY:
            return False
        if not self._looks_settled(step, variance_norms()) or rising:
            self._settled_since = None
            return False
        if self._settled_since is None:
            self._settled_since = step
        return step - self._settled_since >= min(self._memory, max(self._SHORTEST_HOLD, step / self._PART))

    @override
    def looks_at(self, step: int) -> bool:
        return step % self._EVERY == 0

    def _looks_settled(self, step: int, norms: list[float]) -> bool:
        delta = min(self._memory, max(self._SHORTEST_DELTA, step / self._PART))
        if not self._norms or step - max(self._norms) >= delta / self._KEPT_IN_DELTA:
            self._norms[step] = norms
        earlier = [seen for seen in self._norms if seen <= step - delta]
        if not earlier:
            return False
        last = max(earlier)
        self._norms = {seen: values for seen, values in self._norms.items() if seen >= last}
        growth = _growths(self._norms[last], norms, delta / (step - last))
        if not growth:
            return False
        pace = min(self._FASTEST_PACE, step / (step - delta))
        return growth[(len(growth) - 1) // 2] >= self._MOST_SHRINKAGE and all(
            growth[math.ceil(part * len(growth)) - 1] <= max(self._LEAST_GROWTH_ALLOWED, pace**power)
            for part, power in self._GROWTH_ALLOWED
        )

    @override
    def state(self) -> dict[str, Any]:
        return {
            "norms": {step: list(values) for step, values in self._norms.items()},
            "previous_rates": list(self._previous_rates),
            "settled_since": self._settled_since,
        }

    @override
    def load(self, state: dict[str, Any]) -> None:
        """From a checkpoint with one number a look, the total, it begins to look anew."""
        old = any(not isinstance(values, list) for values in state["norms"].values())
        # JSON has made strings of the steps.
        self._norms = {} if old else {int(step): list(values) for step, values in state["norms"].items()}
        self._previous_rates = list(state["previous_rates"])
        self._settled_since = None if old else state["settled_since"]


def _growths(before: list[float], now: list[float], exponent: float) -> list[float]:
    """By what each tensor's norm has grown, to the power of `exponent`, in ascending order; without those that are
    zero still."""
    if len(before) != len(now):
        return []
    pairs = [(one, other) for one, other in zip(before, now, strict=True) if one or other]
    return sorted((other / one) ** exponent if one else math.inf for one, other in pairs)


def make_freeze_rule(freeze_step: int | Literal["auto"], beta2: float) -> FreezeRule:
    """The rule for `freeze_step`; raises ValueError unless it is "auto" or an int of at least 1."""
    if freeze_step == "auto":
        return SettledVariance(beta2)
    if isinstance(freeze_step, bool) or not isinstance(freeze_step, int) or freeze_step < 1:
        raise ValueError(
            f"freeze_step must be 'auto' or a whole number of warmup steps of at least 1, got {freeze_step!r}"
        )
    return FixedFreeze(freeze_step)


def variance_norm(variance: Tensor, settings: AdamSettings, step: int) -> Tensor:
    """The 1-norm of the bias-corrected variance, a float64 scalar, summed in float64."""
    return variance.sum(dtype=torch.float64) / (1 - settings.beta2**step)
