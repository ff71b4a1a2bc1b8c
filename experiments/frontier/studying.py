"""Runs a study's questions, and says where its variants stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from experiments.common.errors import InputError
from experiments.common.results import read_json
from experiments.frontier.contenders import BASELINE
from experiments.frontier.findings import RATES, seconds_at
from experiments.frontier.learning import learn
from experiments.frontier.store import Run, RunStore
from experiments.frontier.studies import Question
from experiments.frontier.subjects import Subject
from experiments.training.findings import deviation
from experiments.training.sweep import best_rate
from experiments.training.trainer import Task

__all__ = ["Baseline", "VariantStanding", "answer", "baselines", "study_summary", "variant_standings"]


@dataclass(frozen=True)
class VariantStanding:
    """A variant at its best rate.

    Attributes:
        rate: the best of `rates_tried`, with the first seed.
        rates_tried: with the first seed.
        seeds: how many ran at it.
        first_loss: the first seed's validation loss after the last step, in nats.
        loss: mean over the seeds.
        deviation: standard deviation of it; 0 for a single seed.
        percent_above: of the mean, from AdamW's mean in the frontier's own file.
        bytes_sent: by one worker in a whole run.
        step_cpu_seconds: processor time of a step, one worker's, median of all its runs.
        seconds: of a whole run by link: computing, and its bytes at the link's rate.
    """

    rate: float
    rates_tried: list[float]
    seeds: int
    first_loss: float
    loss: float
    deviation: float
    percent_above: float
    bytes_sent: float
    step_cpu_seconds: float
    seconds: dict[str, float]


@dataclass(frozen=True)
class Baseline:
    """AdamW in the frontier's own file: its mean loss, and the seconds of a run by link if gradients go in bf16."""

    loss: float
    seconds_in_bf16: dict[str, float]


def variant_standings(runs: Sequence[Run], baseline: Mapping[int, Baseline]) -> dict[str, dict[str, VariantStanding]]:
    """By number of workers and variant, in the order in which they ran; `baseline` is by number of workers."""
    found: dict[str, dict[str, VariantStanding]] = {}
    for workers, name in dict.fromkeys((run.workers, run.contender) for run in runs):
        mine = [run for run in runs if (run.workers, run.contender) == (workers, name)]
        swept = {run.rate: run.outcome.final_loss for run in mine if run.outcome.seed == 0}
        best = best_rate(swept)
        outcomes = [run.outcome for run in mine if run.rate == best]
        loss = mean(outcome.final_loss for outcome in outcomes)
        sent, step = mean(outcome.bytes_sent for outcome in outcomes), median(run.step_cpu_seconds for run in mine)
        computing = step * outcomes[0].curve.steps[-1]
        found.setdefault(str(workers), {})[name] = VariantStanding(
            rate=best,
            rates_tried=sorted(swept),
            seeds=len(outcomes),
            first_loss=swept[best],
            loss=loss,
            deviation=deviation([outcome.final_loss for outcome in outcomes]),
            percent_above=100 * (loss / baseline[workers].loss - 1),
            bytes_sent=sent,
            step_cpu_seconds=step,
            seconds={link: seconds_at(rate, computing, sent) for link, rate in RATES.items()},
        )
    return found


def baselines(path: Path, questions: Sequence[Question], steps: int) -> dict[int, Baseline]:
    """AdamW by number of workers, from the frontier's own file; raises `InputError` where it is not there.

    Args:
        path: of that file.
        questions: whose numbers of workers are asked for.
        steps: of its runs.
    """
    found = read_json(path).get("standings", {}) if path.exists() else {}
    counts = sorted({question.workers for question in questions})
    for count in counts:
        if BASELINE not in found.get(str(count), {}):
            raise InputError(
                f"{path} has no {BASELINE} with {count} workers, which the study is held against: run the same "
                f"command without --study, with --workers {count} --contenders {BASELINE}, first"
            )
    return {count: _baseline(found[str(count)][BASELINE], steps) for count in counts}


def _baseline(standing: Mapping[str, Any], steps: int) -> Baseline:
    computing, halved = steps * standing["step_cpu_seconds"], standing["bytes_sent"] / 2
    return Baseline(standing["loss"], {link: seconds_at(rate, computing, halved) for link, rate in RATES.items()})


def answer(
    question: Question, subject: Subject, task: Task[Any], seeds: int, store: RunStore, say: Callable[[str], None]
) -> None:
    """Runs what the store does not hold yet: all variants with one seed, the first and the best, or all, with all."""
    parents = {one.parent: question.rates for one in question.variants.values()}
    subject = replace(subject, steps=question.steps or subject.steps, rates=parents)

    def run(name: str, ran: int) -> float:
        variant = (name, question.variants[name])
        return learn(subject, task, question.workers, variant, ran, store, say, beyond=False)

    losses = {name: run(name, 1) for name in question.variants}
    best = min(losses, key=lambda name: losses[name] if losses[name] == losses[name] else float("inf"))
    for name in losses if question.all_seeds else dict.fromkeys((next(iter(losses)), best)):
        run(name, min(seeds, question.seeds or seeds))


def study_summary(runs: Sequence[Run], baseline: Mapping[int, Baseline]) -> dict[str, Any]:
    """What a study's file says about its runs."""
    found = variant_standings(runs, baseline)
    return {
        "baseline": {str(count): asdict(one) for count, one in baseline.items()},
        "standings": {count: {name: asdict(one) for name, one in of.items()} for count, of in found.items()},
    }
