"""What the measurements say: steps split into parts, speedups, and the link rates at which the winner changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log, nan
from statistics import median

__all__ = ["ALONE", "StepParts", "crossover", "rate_of_waiting", "split_step", "winning_rate"]

ALONE = "alone"
"""The name of what computes and sends nothing."""

Turn = Mapping[str, float]


@dataclass(frozen=True)
class StepParts:
    """A step in seconds, split so that compute + encode + wire + wait is all of it.

    Attributes:
        seconds: the slowest rank's, median of the turns.
        compute: what a step takes, on the same ranks in the same round, where nobody sends anything.
        encode: what the ranks do beyond that: codecs, copies, the transport's own work.
        wire: of the time they sleep, what the link is busy for.
        wait: the rest of it: latency, other ranks, rounds that follow one another.
        link_busy: the busiest link's bytes at its rate; more than `wire` where some hides behind computing.
        hidden: the fraction of `link_busy` that no rank waits for; NaN where the rate is not limited.
        cpu: processor time, all threads, mean of the ranks.
        interface_bytes: of the busiest interface, headers included.
    """

    seconds: float
    compute: float
    encode: float
    wire: float
    wait: float
    link_busy: float
    hidden: float
    cpu: float
    interface_bytes: float


def split_step(turns: Sequence[Turn], alone: Sequence[Turn], megabits: float | None) -> StepParts:
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
    return StepParts(
        seconds=seconds,
        compute=compute,
        encode=awake - compute,
        wire=wire,
        wait=asleep - wire,
        link_busy=link_busy,
        hidden=1 - wire / link_busy if link_busy else nan,
        cpu=median(turn["cpu"] for turn in turns),
        interface_bytes=interface_bytes,
    )


def rate_of_waiting(turns: Mapping[float, Sequence[Turn]], fraction: float) -> float:
    """The link rate at which steps spend `fraction` of their time waiting, between measured rates; NaN if none does."""
    waits = {rate: median(turn["waited"] / turn["seconds"] for turn in at_rate) for rate, at_rate in turns.items()}
    return crossover({rate: waited - fraction for rate, waited in waits.items()})


def winning_rate(ours: Mapping[float, float], theirs: Mapping[float, float]) -> float:
    """The link rate under which ours takes less time than theirs; infinite if at all rates, NaN if at none.

    Args:
        ours: seconds a step by rate.
        theirs: the same, at the same rates.
    """
    leads = {rate: log(theirs[rate] / ours[rate]) for rate in sorted(ours)}
    values = list(leads.values())
    if all(lead > 0 for lead in values):
        return float("inf")
    return crossover(leads)


def crossover(values: Mapping[float, float]) -> float:
    """Where values that are positive at low rates first cross zero, straight on a logarithmic axis; NaN if nowhere."""
    rates = sorted(values)
    for low, high in pairwise(rates):
        if values[low] > 0 >= values[high]:
            share = values[low] / (values[low] - values[high])
            return exp(log(low) + share * (log(high) - log(low)))
    return nan
