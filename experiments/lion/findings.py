"""What the runs of `experiments.lion` say: figures for the JSON, sentences for the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import mean

from experiments.training.findings import deviation
from experiments.training.optimizers import OPTIMIZERS, PARENTS
from experiments.training.reporting import human_factor
from experiments.training.sweep import best_rate
from experiments.training.trainer import Outcome

__all__ = ["BASELINE", "Finding", "find", "sentences", "titles"]

BASELINE = "adamw"
"""What everything is compared with."""


@dataclass(frozen=True)
class Finding:
    """A method at its best rate. Losses are validation losses at the end, in nats a character.

    Attributes:
        learning_rate: the best of those tried with the first seed.
        inside_the_sweep: lower and higher rates were tried.
        final_loss: mean over the seeds.
        deviation: standard deviation of it; 0 for a single seed.
        difference_percent: of the mean from others' means, by method: the baseline, and the exact method it is made of.
        bytes_sent: by one rank in a whole run, mean over the seeds.
        fewer_bytes: the baseline's bytes over these.
    """

    learning_rate: float
    inside_the_sweep: bool
    final_loss: float
    deviation: float
    difference_percent: dict[str, float]
    bytes_sent: float
    fewer_bytes: float | None


def find(swept: Mapping[str, Mapping[float, float]], outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Finding]:
    """The figures by method, from final losses by rate and from the seeds' outcomes at the best rate."""
    losses = {name: mean(outcome.final_loss for outcome in seeds) for name, seeds in outcomes.items()}
    sent = {name: mean(outcome.bytes_sent for outcome in seeds) for name, seeds in outcomes.items()}
    found = {}
    for name, seeds in outcomes.items():
        best = best_rate(swept[name])
        others = [other for other in dict.fromkeys((PARENTS.get(name), BASELINE)) if other in losses and other != name]
        finals = [outcome.final_loss for outcome in seeds]
        found[name] = Finding(
            learning_rate=best,
            inside_the_sweep=min(swept[name]) < best < max(swept[name]),
            final_loss=losses[name],
            deviation=deviation(finals),
            difference_percent={other: 100 * (losses[name] / losses[other] - 1) for other in others},
            bytes_sent=sent[name],
            fewer_bytes=sent[BASELINE] / sent[name] if sent[name] else None,
        )
    return found


def sentences(found: Mapping[str, Finding]) -> list[str]:
    """A line for each method that compresses, or where none does for each but the baseline."""
    return [_sentence(name, found[name]) for name in _told(found)]


def titles(found: Mapping[str, Finding]) -> list[str]:
    """The same as titles of a picture, beside the exact method of each."""
    return [_title(name, found[name]) for name in _told(found)] or ["Final loss by learning rate"]


def _told(found: Mapping[str, Finding]) -> list[str]:
    return [name for name in found if name in PARENTS] or [name for name in found if name != BASELINE]


def _title(name: str, one: Finding) -> str:
    label = OPTIMIZERS[name].label
    if not isfinite(one.final_loss):
        return f"{label} diverged at every rate"
    sends = f"sends {human_factor(one.fewer_bytes)} fewer bytes and " if name in PARENTS and one.fewer_bytes else ""
    other = PARENTS.get(name, BASELINE)
    apart = one.difference_percent.get(other)
    if apart is None:
        return f"{label} {sends}ends at a loss of {one.final_loss:.3f}"
    side = "below" if apart < 0 else "above"
    return f"{label} {sends}ends {abs(apart):.1f}% {side} {OPTIMIZERS[other].label}'s loss"


def _sentence(name: str, one: Finding) -> str:
    label = OPTIMIZERS[name].label
    if not isfinite(one.final_loss):
        return f"{label} diverged at every rate"
    losses = ", ".join(
        f"{difference:+.1f}% beside {OPTIMIZERS[other].label}" for other, difference in one.difference_percent.items()
    )
    fewer = f"; {one.fewer_bytes:.1f}x fewer bytes" if name in PARENTS and one.fewer_bytes else ""
    return f"{label}, each at its best rate: loss {losses}{fewer}"
