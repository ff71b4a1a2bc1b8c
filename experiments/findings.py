"""What a comparison shows, computed from its numbers: the sentence on the picture, the figures in the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import mean, stdev

from experiments.training import Outcome

__all__ = ["Finding", "compare"]

_TOLERANCE_PERCENT = 1.0
"""Losses this close count as the same."""


@dataclass(frozen=True)
class Finding:
    """AdamW against 1-bit Adam, over one run or several.

    Attributes:
        adamw_loss: mean final validation loss, in nats.
        onebit_adam_loss: the same.
        difference_percent: of the second from the first; negative when 1-bit Adam is better.
        adamw_deviation: standard deviation over the runs, in nats; 0 for a single run.
        onebit_adam_deviation: the same.
        same_loss: the difference is within 1%, or within one standard deviation of AdamW if that is
            larger, or in favour of 1-bit Adam.
        fewer_bytes: AdamW's bytes over 1-bit Adam's, whole run.
        fewer_bytes_frozen: the same for one step after the freeze; None if it never froze.
    """

    adamw_loss: float
    onebit_adam_loss: float
    difference_percent: float
    adamw_deviation: float
    onebit_adam_deviation: float
    same_loss: bool
    fewer_bytes: float
    fewer_bytes_frozen: float | None

    @property
    def claim(self) -> str:
        """The finding in one line, about 1-bit Adam."""
        if not isfinite(self.difference_percent):
            return "diverged"
        if abs(self.difference_percent) <= _TOLERANCE_PERCENT:
            loss = f"same loss ({self.difference_percent:+.1f}%)"
        else:
            loss = f"{self.difference_percent:+.1f}% loss"
        if self.fewer_bytes_frozen is None:
            return f"{loss}, no fewer bytes: it never froze its variance"
        return f"{loss}, {self.fewer_bytes:.1f}x fewer bytes, {self.fewer_bytes_frozen:.0f}x fewer once frozen"


def compare(adamw: Sequence[Outcome], onebit_adam: Sequence[Outcome]) -> Finding:
    """Compares runs of the two optimizers with the same seeds, on at least two ranks."""
    losses = [outcome.final_loss for outcome in adamw]
    onebit_losses = [outcome.final_loss for outcome in onebit_adam]
    loss, onebit_loss, deviation = mean(losses), mean(onebit_losses), _deviation(losses)
    froze = all(outcome.frozen_at is not None for outcome in onebit_adam)
    return Finding(
        adamw_loss=loss,
        onebit_adam_loss=onebit_loss,
        difference_percent=100 * (onebit_loss / loss - 1),
        adamw_deviation=deviation,
        onebit_adam_deviation=_deviation(onebit_losses),
        same_loss=onebit_loss - loss <= max(_TOLERANCE_PERCENT / 100 * loss, deviation),
        fewer_bytes=_ratio([one.bytes_sent for one in adamw], [one.bytes_sent for one in onebit_adam]),
        fewer_bytes_frozen=_ratio([one.last_step_bytes for one in adamw], [one.last_step_bytes for one in onebit_adam])
        if froze
        else None,
    )


def _ratio(numerators: Sequence[int], denominators: Sequence[int]) -> float:
    return mean(numerators) / mean(denominators)


def _deviation(losses: Sequence[float]) -> float:
    return stdev(losses) if len(losses) > 1 else 0.0
