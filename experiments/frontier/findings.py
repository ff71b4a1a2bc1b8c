"""What the runs say: where each contender stands at its best rate, the sentences about it, and what was not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from statistics import mean, median
from typing import Any

from experiments.frontier.contenders import BASELINE, CONTENDERS
from experiments.frontier.store import Run
from experiments.training.findings import deviation
from experiments.training.reporting import human_factor
from experiments.training.sweep import best_rate

__all__ = ["RATES", "Standing", "missing", "seconds_at", "sentences", "standings", "summary", "title"]

RATES = {"20 Mb/s": 20e6, "100 Mb/s": 100e6, "1 Gb/s": 1e9}
"""Links, in bits a second."""

_SAME_PERCENT = 1.0


@dataclass(frozen=True)
class Standing:
    """A contender at its best rate. Losses are validation losses after the last step, in nats.

    Attributes:
        rate: the best of those tried with the first seed.
        inside_the_sweep: lower and higher rates were tried.
        seeds: how many ran at it.
        loss: mean over the seeds.
        deviation: standard deviation of it; 0 for a single seed.
        bytes_sent: by one worker in a whole run.
        step_cpu_seconds: processor time of a step, one worker's, median of all its runs.
        seconds: of a whole run by link: computing, and its bytes at the link's rate.
        percent_above: of the mean loss, from others' means: the baseline's, and of what differs in one choice.
        fewer_bytes: the baseline's bytes over these; None for itself.
    """

    rate: float
    inside_the_sweep: bool
    seeds: int
    loss: float
    deviation: float
    bytes_sent: float
    step_cpu_seconds: float
    seconds: dict[str, float]
    percent_above: dict[str, float]
    fewer_bytes: float | None


def seconds_at(bits_a_second: float, computing: float, nbytes: float) -> float:
    """Computing, and then sending: no latency, and nothing overlaps."""
    return computing + 8 * nbytes / bits_a_second


def standings(runs: Sequence[Run], workers: int, steps: int) -> dict[str, Standing]:
    """By contender, of those that have a run at their best rate, with so many workers; the order is the table's."""
    losses: dict[str, float] = {}
    found: dict[str, Standing] = {}
    for name in CONTENDERS:
        mine = [run for run in runs if run.workers == workers and run.contender == name]
        swept = {run.rate: run.outcome.final_loss for run in mine if run.outcome.seed == 0}
        if not swept:
            continue
        best = best_rate(swept)
        outcomes = [run.outcome for run in mine if run.rate == best]
        finals = [outcome.final_loss for outcome in outcomes]
        losses[name] = mean(finals)
        sent = mean(outcome.bytes_sent for outcome in outcomes)
        step = median(run.step_cpu_seconds for run in mine)
        others = [one for one in dict.fromkeys((BASELINE, CONTENDERS[name].beside)) if one in losses and one != name]
        found[name] = Standing(
            rate=best,
            inside_the_sweep=min(swept) < best < max(swept),
            seeds=len(outcomes),
            loss=losses[name],
            deviation=deviation(finals),
            bytes_sent=sent,
            step_cpu_seconds=step,
            seconds={link: seconds_at(rate, steps * step, sent) for link, rate in RATES.items()},
            percent_above={other: 100 * (losses[name] / losses[other] - 1) for other in others if other is not None},
            fewer_bytes=found[BASELINE].bytes_sent / sent if BASELINE in found and sent else None,
        )
    return found


def sentences(found: Mapping[str, Standing], workers: int) -> list[str]:
    """A line for each contender but the baseline."""
    lines = []
    for name, one in found.items():
        if name == BASELINE or BASELINE not in found:
            continue
        label = CONTENDERS[name].label
        if not isfinite(one.loss):
            lines.append(f"{workers} workers: {label} diverged at every rate")
            continue
        losses = ", ".join(f"{percent:+.2f}% beside {CONTENDERS[o].label}" for o, percent in one.percent_above.items())
        lines.append(f"{workers} workers: {label}: loss {losses}; {_fewer(one)} fewer bytes")
    return lines


def title(found: Mapping[str, Standing], workers: int) -> str:
    """About what sends least within 1% of the baseline's loss, and least of all, among those with as many seeds."""
    others = {
        name: one
        for name, one in found.items()
        if isfinite(one.loss) and BASELINE in one.percent_above and one.seeds >= found[BASELINE].seeds
    }
    if not others:
        return f"Loss by bytes sent, {workers} workers"
    near = {name: one for name, one in others.items() if one.percent_above[BASELINE] <= _SAME_PERCENT}
    least = min(others, key=lambda name: others[name].bytes_sent)
    first = min(near, key=lambda name: near[name].bytes_sent, default=least)
    baseline = CONTENDERS[BASELINE].label
    apart = others[first].percent_above[BASELINE]
    beside = f"{abs(apart):.1f}% {'below' if apart < 0 else 'above'} its loss"
    text = f"{CONTENDERS[first].label}: {_fewer(others[first])} fewer bytes than {baseline}, {beside}"
    if first != least:
        text += (
            f"; {CONTENDERS[least].label}: {_fewer(others[least])}, {others[least].percent_above[BASELINE]:.1f}% above"
        )
    return f"{text} ({workers} workers)"


def _fewer(one: Standing) -> str:
    return human_factor(one.fewer_bytes or 1)


def missing(
    found: Mapping[int, Mapping[str, Standing]], contenders: Sequence[str], workers: Sequence[int], seeds: int
) -> list[str]:
    """Who has not run, or not with every seed."""
    lines = []
    for count in workers:
        for name in contenders:
            ran = found.get(count, {}).get(name)
            if ran is None or ran.seeds < seeds:
                lines.append(
                    f"{CONTENDERS[name].label}, {count} workers: {0 if ran is None else ran.seeds} of {seeds} seeds"
                )
    return lines


def summary(
    runs: Sequence[Run], steps: int, contenders: Sequence[str], workers: Sequence[int], seeds: int
) -> dict[str, Any]:
    """What a file says about its runs."""
    found = {count: standings(runs, count, steps) for count in workers}
    return {
        "findings": [line for count, one in found.items() for line in sentences(one, count)],
        "not_run": missing(found, contenders, workers, seeds),
        "standings": {str(count): {name: asdict(one) for name, one in of.items()} for count, of in found.items()},
    }
