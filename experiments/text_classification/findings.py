"""What the runs say: figures for the JSON, a sentence for the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from experiments.training.findings import deviation
from experiments.training.optimizers import OPTIMIZERS
from experiments.training.sweep import best_rate

# Learning imports transformers, which takes seconds.
if TYPE_CHECKING:
    from experiments.text_classification.learning import Outcome

__all__ = ["BASELINE", "POINTS", "Finding", "find", "frozen_bytes", "sentence"]

BASELINE = "adamw"
"""What everything is compared with."""

POINTS = 0.5
"""Percentage points of accuracy that count as the same."""


@dataclass(frozen=True)
class Finding:
    """A method at its best rate.

    Attributes:
        learning_rate: the best of those tried with the first seed, by validation.
        inside_the_sweep: lower and higher rates were tried.
        test: accuracy in percent, mean over the seeds.
        deviation: standard deviation of it; 0 for a single seed.
        points: of the mean above the baseline's.
        points_deviation: standard deviation of the seeds' own differences; 0 for a single seed.
        frozen_bytes: through the interface, a rank and step once the 1-bit optimizer is frozen.
        fewer_bytes_frozen: the baseline's over these.
        fewer_bytes: the same for whole runs.
    """

    learning_rate: float
    inside_the_sweep: bool
    test: float
    deviation: float
    points: float
    points_deviation: float
    frozen_bytes: float
    fewer_bytes_frozen: float | None
    fewer_bytes: float | None


def find(
    swept: Mapping[str, Mapping[float, float]], runs: Mapping[str, Sequence[Outcome]], freeze_step: int
) -> dict[str, Finding]:
    """The figures by method, from validation errors by rate and from the seeds' outcomes at the best rate."""
    frozen = {name: mean(frozen_bytes(one, freeze_step) for one in outcomes) for name, outcomes in runs.items()}
    whole = {name: mean(sum(one.interface) for one in outcomes) for name, outcomes in runs.items()}
    found = {}
    for name, outcomes in runs.items():
        best, rates = best_rate(swept[name]), swept[name]
        test = [one.test for one in outcomes]
        differences = [one.test - other.test for one, other in zip(outcomes, runs[BASELINE], strict=True)]
        found[name] = Finding(
            learning_rate=best,
            inside_the_sweep=min(rates) < best < max(rates),
            test=mean(test),
            deviation=deviation(test),
            points=mean(differences),
            points_deviation=deviation(differences),
            frozen_bytes=frozen[name],
            fewer_bytes_frozen=frozen[BASELINE] / frozen[name] if frozen[name] else None,
            fewer_bytes=whole[BASELINE] / whole[name] if whole[name] else None,
        )
    return found


def frozen_bytes(outcome: Outcome, freeze_step: int) -> float:
    """Mean bytes of the steps after the freeze; the first of them, in which buckets are made, is left out."""
    return mean(outcome.interface[freeze_step + 1 :] or [0.0])


def sentence(name: str, one: Finding) -> str:
    """The finding in one line, about a method that is not the baseline."""
    label, other = OPTIMIZERS[name].label, f"{OPTIMIZERS[BASELINE].label} under DDP"
    if abs(one.points) <= POINTS:
        accuracy = f"as accurate as {other} ({one.points:+.2f} points)"
    else:
        accuracy = f"{abs(one.points):.1f} points {'more' if one.points > 0 else 'less'} accurate than {other}"
    fewer = f", {one.fewer_bytes_frozen:.0f}x fewer bytes once frozen" if one.fewer_bytes_frozen else ""
    return f"{label} in Hugging Face's Trainer: {accuracy}{fewer}"
