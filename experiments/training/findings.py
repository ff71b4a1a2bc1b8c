"""What a comparison shows, computed from its numbers: the sentence on the picture, the figures in the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan
from statistics import mean, stdev

from experiments.training.reporting import human_factor
from experiments.training.trainer import Outcome

__all__ = ["Finding", "compare", "deviation", "headline"]

_TOLERANCE_PERCENT = 1.0
"""Losses this close count as the same."""


@dataclass(frozen=True)
class Finding:
    """An exact optimizer against the 1-bit one made from it, over one run or several.

    Attributes:
        exact_loss: mean final validation loss, in nats.
        onebit_loss: the same.
        difference_percent: of the second from the first; negative when the 1-bit optimizer is better.
        exact_deviation: standard deviation over the runs, in nats; 0 for a single run.
        onebit_deviation: the same.
        same_loss: the difference is within 1%, or within one standard deviation of the exact optimizer if that is
            larger, or in favour of the 1-bit one.
        fewer_bytes: the exact optimizer's bytes over the 1-bit one's, whole run.
        fewer_bytes_frozen: the same for the last step, in which 0/1 Adam synchronises; None if nothing was frozen.
    """

    exact_loss: float
    onebit_loss: float
    difference_percent: float
    exact_deviation: float
    onebit_deviation: float
    same_loss: bool
    fewer_bytes: float
    fewer_bytes_frozen: float | None

    @property
    def claim(self) -> str:
        """The finding in one line, about the 1-bit optimizer."""
        if not isfinite(self.difference_percent):
            return "diverged"
        if abs(self.difference_percent) <= _TOLERANCE_PERCENT:
            loss = f"same loss ({self.difference_percent:+.1f}%)"
        else:
            loss = f"{_apart(self.difference_percent, 'lower', 'higher')} loss"
        fewer = f"{loss}, {self.fewer_bytes:.1f}x fewer bytes"
        if self.fewer_bytes_frozen is not None:
            return f"{fewer}, {self.fewer_bytes_frozen:.0f}x fewer once frozen"
        return fewer if self.fewer_bytes > 1 else f"{loss}, no fewer bytes: it never froze its variance"


def headline(onebit: str, exact: str, findings: Sequence[Finding], seeds: int) -> str:
    """The title of a picture of these findings, about optimizers of these names: fewest bytes and worst loss of all."""
    if not all(isfinite(finding.difference_percent) for finding in findings):
        return f"{onebit} diverged"
    fewest, most = (human_factor(pick(finding.fewer_bytes for finding in findings)) for pick in (min, max))
    bytes_saved = fewest if fewest == most else f"{fewest} to {most}"
    worst = max(finding.difference_percent for finding in findings)
    limit = "" if len(findings) == 1 else "at most " if worst > 0 else "at least "
    text = f"{onebit} sends {bytes_saved} fewer bytes and ends {limit}{_apart(worst, 'below', 'above')} {exact}'s loss"
    return f"{text} (one seed)" if seeds == 1 else text


def compare(exact: Sequence[Outcome], onebit: Sequence[Outcome]) -> Finding:
    """Compares runs of the two optimizers with the same seeds, on at least two ranks."""
    losses = [outcome.final_loss for outcome in exact]
    onebit_losses = [outcome.final_loss for outcome in onebit]
    loss, onebit_loss, exact_deviation = mean(losses), mean(onebit_losses), deviation(losses)
    froze = all(outcome.frozen_at is not None for outcome in onebit)
    return Finding(
        exact_loss=loss,
        onebit_loss=onebit_loss,
        difference_percent=100 * (onebit_loss / loss - 1),
        exact_deviation=exact_deviation,
        onebit_deviation=deviation(onebit_losses),
        same_loss=onebit_loss - loss <= max(_TOLERANCE_PERCENT / 100 * loss, exact_deviation),
        fewer_bytes=_ratio([one.bytes_sent for one in exact], [one.bytes_sent for one in onebit]),
        fewer_bytes_frozen=_ratio([one.last_step_bytes for one in exact], [one.last_step_bytes for one in onebit])
        if froze
        else None,
    )


def _apart(percent: float, less: str, more: str) -> str:
    size = abs(percent)
    return f"{size:.{1 if size < 9.95 else 0}f}% {less if percent < 0 else more}"


def _ratio(numerators: Sequence[int], denominators: Sequence[int]) -> float:
    return mean(numerators) / mean(denominators)


def deviation(losses: Sequence[float]) -> float:
    """Standard deviation; 0 for a single loss, NaN where one is not finite."""
    if not all(map(isfinite, losses)):
        return nan
    return stdev(losses) if len(losses) > 1 else 0.0
