"""When 1-bit Adam freezes its variance: at a given step, or when the variance has settled.
The decision uses what is the same on every rank; the ranks compare it at every look all the same, since a learning
rate that differs would let one of them freeze alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

__all__ = ["FixedFreeze", "FreezeRule", "SettledVariance", "make_freeze_rule"]


class FreezeRule(Protocol):
    """Says after each warmup step whether it was the last one."""

    def reached(self, step: int, learning_rates: Sequence[float], variance_norm: Callable[[], float]) -> bool:
        """Whether to freeze after warmup step `step` (from 1 on); `variance_norm` computes the bias-corrected
        1-norm of v when called."""

    def looks_at(self, step: int) -> bool:
        """Whether the answer for `step` depends on more than the step: the ranks then compare theirs."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""


class FixedFreeze:
    """Freeze after warmup step `freeze_step`."""

    def __init__(self, freeze_step: int) -> None:
        self._freeze_step = freeze_step

    def reached(self, step: int, learning_rates: Sequence[float], variance_norm: Callable[[], float]) -> bool:
        """See FreezeRule."""
        return step >= self._freeze_step

    def looks_at(self, step: int) -> bool:
        """See FreezeRule."""
        return False

    def state(self) -> dict[str, Any]:
        """See FreezeRule."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """See FreezeRule."""
        del state  # a fixed step remembers nothing


class SettledVariance:
    """Freeze once the learning rate has stopped rising and the variance has settled, and stays settled for a while.

    Tang et al. 2021 (1-bit Adam): freeze when ‖v_{t-Δ}‖₁ / ‖v_t‖₁ ≥ 0.96 with Δ = 1/(1-β₂), after the
    learning-rate warmup. Here v is bias-corrected and Δ = min(1/(1-β₂), max(20, t/5)), so that a run of a few hundred
    steps can freeze too; from step 5/(1-β₂) on it is the paper's ratio. A variance that shrinks only makes steps come
    out smaller: up to 15% over Δ is allowed, which a run whose loss goes to zero needs. With so short a Δ a plateau
    early in training looks settled, so the ratio has to hold for min(1/(1-β₂), max(50, t/3)) steps.
    """

    _MOST_GROWTH = 1 / 0.96
    _MOST_SHRINKAGE = 0.85
    _EVERY = 10  # steps between two looks at the variance, each a pass over v and a device synchronisation
    _SHORTEST_DELTA = 20
    _SHORTEST_HOLD = 50

    def __init__(self, beta2: float) -> None:
        self._memory = 1.0 / (1.0 - beta2)
        self._norms: dict[int, float] = {}
        self._previous_rates: list[float] = []
        self._settled_since: int | None = None

    def reached(self, step: int, learning_rates: Sequence[float], variance_norm: Callable[[], float]) -> bool:
        """See FreezeRule."""
        rising = any(now > before for now, before in zip(learning_rates, self._previous_rates, strict=False))
        self._previous_rates = list(learning_rates)
        if rising:
            self._settled_since = None
        if step % self._EVERY:
            return False
        if not self._looks_settled(step, variance_norm()) or rising:
            self._settled_since = None
            return False
        if self._settled_since is None:
            self._settled_since = step
        return step - self._settled_since >= min(self._memory, max(self._SHORTEST_HOLD, step / 3))

    def looks_at(self, step: int) -> bool:
        """See FreezeRule."""
        return step % self._EVERY == 0

    def _looks_settled(self, step: int, norm: float) -> bool:
        self._norms[step] = norm
        delta = min(self._memory, max(self._SHORTEST_DELTA, step / 5))
        earlier = [seen for seen in self._norms if seen <= step - delta]
        if not earlier:
            return False
        reference = self._norms[max(earlier)]
        self._norms = {seen: value for seen, value in self._norms.items() if seen >= max(earlier)}
        return reference > 0 and self._MOST_SHRINKAGE <= norm / reference <= self._MOST_GROWTH

    def state(self) -> dict[str, Any]:
        """See FreezeRule."""
        return {
            "norms": dict(self._norms),
            "previous_rates": list(self._previous_rates),
            "settled_since": self._settled_since,
        }

    def load(self, state: dict[str, Any]) -> None:
        """See FreezeRule."""
        self._norms = {int(step): norm for step, norm in state["norms"].items()}  # JSON has made strings of the steps
        self._previous_rates = list(state["previous_rates"])
        self._settled_since = state["settled_since"]


def make_freeze_rule(freeze_step: int | Literal["auto"], beta2: float) -> FreezeRule:
    """The rule for `freeze_step`; raises ValueError unless it is "auto" or an int of at least 1."""
    if freeze_step == "auto":
        return SettledVariance(beta2)
    if isinstance(freeze_step, bool) or not isinstance(freeze_step, int) or freeze_step < 1:
        raise ValueError(
            f"freeze_step must be 'auto' or a whole number of warmup steps of at least 1, got {freeze_step!r}"
        )
    return FixedFreeze(freeze_step)
