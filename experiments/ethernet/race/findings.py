"""What the measurements say: steps broken down, speedups, and the link rates at which the winner changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, log, nan
from statistics import median

__all__ = ["ALONE", "StepBreakdown", "Turn", "crossover", "rate_of_waiting", "speedup", "split_step", "winning_rate"]

ALONE = "alone"
"""The name of what computes and sends nothing."""

Turn = Mapping[str, float]


@dataclass(frozen=True)
class StepBreakdown:
    """A step in seconds, split so that compute + encode + wire + wait is all of it.

    Attributes:
        seconds: the slowest rank's, median of the turns.
        compute: what a step takes, on the same ranks in the same round, where nobody sends anything.
        encode: what the ranks do beyond that: codecs, copies, the transport's own work.
        wire: of the time they sleep, what the link is busy for.
        wait: the rest of it: latency, other ranks, rounds that follow one another.
        link_busy: the busiest link's bytes at its rate; more than `wire` where some hides behind computing.
        hidden: the fraction of `link_busy` that no rank waits for; None where the rate is not limited.
        cpu: processor time, all threads, mean of the ranks.
        interface_bytes: of the busiest interface, headers included.
    """

    seconds: float
    compute: float
    encode: float
    wire: float
    wait: float
    link_busy: float
    hidden: float | None
    cpu: float
    interface_bytes: float


def split_step(turns: Sequence[Turn], alone: Sequence[Turn], megabits: float | None) -> StepBreakdown:
    """Splits a contender's step, given its turns and those without a network, round by round.

    Args:
        turns: `seconds`, `waited`, `cpu` and `interface_bytes` a step.
        alone: the same of `ALONE`.
        megabits: of the links, in 10⁶ bits a second; None is unlimited.
    """
    seconds = median(turn["seconds"] for turn in turns)
    asleep = min(seconds, median(turn["waited"] for turn in turns))
    awake = seconds - asleep
    # Ranks that sleep leave the cores to others, so that computing may take less than without a network.
    compute = min(awake, median(turn["seconds"] for turn in alone))
    interface_bytes = median(turn["interface_bytes"] for turn in turns)
    link_busy = 0.0 if megabits is None else 8 * interface_bytes / (1e6 * megabits)
    wire = min(asleep, link_busy)
    return StepBreakdown(
        seconds=seconds,
        compute=compute,
        encode=awake - compute,
        wire=wire,
        wait=asleep - wire,
        link_busy=link_busy,
        hidden=1 - wire / link_busy if link_busy else None,
        cpu=median(turn["cpu"] for turn in turns),
        interface_bytes=interface_bytes,
    )


def rate_of_waiting(turns: Mapping[float, Sequence[Turn]], fraction: float) -> float:
    """The link rate at which steps spend `fraction` of their time waiting, between measured rates; NaN if none does."""
    waits = {rate: median(turn["waited"] / turn["seconds"] for turn in at_rate) for rate, at_rate in turns.items()}
    return crossover({rate: waited - fraction for rate, waited in waits.items()})


def speedup(turns: Sequence[Turn], baseline: Sequence[Turn]) -> float:
    """How many times faster than the baseline a step is: the median of the rounds, each compared within itself."""
    return median(theirs["seconds"] / ours["seconds"] for ours, theirs in zip(turns, baseline, strict=True))


def winning_rate(speedups: Mapping[float, float]) -> float:
    """The link rate under which steps are faster than the baseline's; infinite if at all rates, NaN if at none.

    Args:
        speedups: over the baseline, by rate.
    """
    if all(speedup > 1 for speedup in speedups.values()):
        return inf
    return crossover({rate: log(speedup) for rate, speedup in speedups.items()})


def crossover(values: Mapping[float, float]) -> float:
    """Where values that are positive at low rates first cross zero, straight on a logarithmic axis; NaN if nowhere."""
    rates = sorted(values)
    for low, high in pairwise(rates):
        if values[low] > 0 >= values[high]:
            share = values[low] / (values[low] - values[high])
            return exp(log(low) + share * (log(high) - log(low)))
    return nan
