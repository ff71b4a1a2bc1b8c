"""Recommendation of a method: predictions compared, the loss that each method costs, measured or published, and the
time that failing nodes do."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinwire.plan.cluster import Cluster
from thinwire.plan.methods import DILOCO, POWERSGD, Method, Schedule
from thinwire.plan.prediction import Prediction, predict
from thinwire.plan.units import PlanError, require_positive, seconds_in_words
from thinwire.plan.workload import STATE_BYTES, Workload

# DiLoCo's losses by model size and workers, as published

SOURCE = "arXiv 2503.09799"
SMALLEST = 35_000_000
"""Parameters of the smallest model there: below it nothing is known but that it gets worse."""

_SIZES = (35e6, 90e6, 180e6, 335e6, 550e6, 1.3e9, 2.4e9)
# Losses of data parallel training and of 1, 2, 4 and 8 workers, C4, every = 30 (table 4).
_DATA_PARALLEL = (3.485, 3.167, 2.950, 2.784, 2.653, 2.460, 2.326)
_LOSSES = {
    1: (3.482, 3.162, 2.943, 2.777, 2.645, 2.451, 2.317),
    2: (3.508, 3.182, 2.957, 2.788, 2.657, 2.464, 2.323),
    4: (3.554, 3.213, 2.981, 2.808, 2.673, 2.472, 2.332),
    8: (3.621, 3.265, 3.019, 2.841, 2.698, 2.493, 2.351),
}


def local_updates_loss(parameters: int, workers: int) -> float:
    """The final loss of DiLoCo above that of data parallel training on as many tokens, relative.

    Between published sizes and numbers of workers linear in their logarithms; beyond them as at the nearest.
    """
    by_workers = []
    for losses in _LOSSES.values():
        relative = [loss / exact - 1 for loss, exact in zip(losses, _DATA_PARALLEL, strict=True)]
        by_workers.append(_interpolate(_SIZES, relative, parameters))
    return _interpolate(tuple(_LOSSES), by_workers, workers)


def _interpolate(places: Sequence[float], values: Sequence[float], place: float) -> float:
    """Of a line through the two nearest, in logarithms, the value at `place`; the first or the last value outside."""
    if place <= places[0] or place >= places[-1]:
        return values[0] if place <= places[0] else values[-1]
    right = bisect_right(places, place)
    left, here, end = (math.log(one) for one in (places[right - 1], place, places[right]))
    return values[right - 1] + (here - left) / (end - left) * (values[right] - values[right - 1])


# Losses as measured here: the figures of experiments/results, which a test compares

# The final loss above the exact optimizer's, relative, that a recommendation may cost.
_ACCEPTED = 0.02
_LEAST_SEEDS = 3


@dataclass(frozen=True)
class MeasuredLoss:
    """`difference`: of the final loss beside that of `beside`, relative, negative where it was lower; `where` it was
    measured, and on how many `seeds`."""

    difference: float
    beside: str
    where: str
    seeds: int


LOSSES: dict[str, MeasuredLoss] = {
    "onebit-adam": MeasuredLoss(-0.001, "AdamW", "BERT-tiny on text", 3),
    "onebit-lamb": MeasuredLoss(0.031, "LAMB", "BERT-tiny on text", 3),
    "zero-one-adam": MeasuredLoss(0.039, "AdamW", "BERT-tiny on text", 3),
    "onebit-lion": MeasuredLoss(0.072, "AdamW", "a small GPT on text", 3),
    "onebit-muon": MeasuredLoss(-0.027, "AdamW", "a small GPT on text", 3),  # BERT-tiny, one seed: 3.3% below
}
"""By algorithm. Averages that are exact, or in bf16, count as costing nothing (Agarwal et al., MLSys 2022)."""


def keeps_the_loss(method: Method) -> bool:
    """Whether it may be recommended: exact averages, or a loss that was measured, on 3 seeds, and is near enough.

    PowerSGD may not: what it loses depends on the model, and in our races rank 16 alone reached DDP's loss. Nor may
    DiLoCo, of which others have published what it loses, and stage 3 through codecs, which no 3 seeds have shown.
    """
    if method.algorithm in (POWERSGD, DILOCO) or method.has_codecs:
        return False
    if method.entry is None:
        return True
    measured = LOSSES.get(method.algorithm)
    return measured is not None and measured.difference <= _ACCEPTED and measured.seeds >= _LEAST_SEEDS


def loss_in_words(method: Method, parameters: int, workers: int) -> str:
    """What is known of it, for one line; `workers`: that train by themselves, with DiLoCo."""
    if method.algorithm == DILOCO:
        text = f"{local_updates_loss(parameters, workers):+.1%} beside data parallel, published with AdamW inside"
        beyond = [SOURCE]
        if parameters < SMALLEST:
            beyond.append(f"for {SMALLEST / 1e6:.0f}M parameters; below that it is worse")
        if workers > max(_LOSSES):
            beyond.append(f"for {max(_LOSSES)} workers; with more it is worse")
        return f"{text} ({'; '.join(beyond)})"
    if method.algorithm == POWERSGD:
        return "speed only: its loss has to be tried; in our races rank 16 alone reached DDP's"
    if method.has_codecs:
        return "speed only: what these codecs cost has to be tried"
    if method.entry is None:
        return "none: averages are exact, or in bf16"
    measured = LOSSES.get(method.algorithm)
    if measured is None:
        return "not measured"
    seeds = "1 seed" if measured.seeds == 1 else f"{measured.seeds} seeds"
    return f"{measured.difference:+.1%} beside {measured.beside} ({measured.where}, {seeds})"


BASELINE = Method("ddp-bf16")
WORTH_IT = 1.1
"""Times as fast as the baseline from which another method is worth its trouble."""

# Bytes a second: the rates among which a break-even is looked for, and how finely.
_SLOWEST, _FASTEST = 1e4, 1e13
_LOOKS = 30
_BISECTIONS = 24


@dataclass(frozen=True)
class Plan:
    """Predictions of every method asked for, in that order, for `workload` on `cluster` over `schedule`.

    `best`: the fastest average step among the methods that fit into `memory_limit` bytes a rank (None: any fits) and
    were measured to keep the loss, but the baseline where it takes no tenth longer; with `speed_only` just the fastest
    that fits. None where there is none.
    """

    workload: Workload
    cluster: Cluster
    schedule: Schedule
    predictions: tuple[Prediction, ...]
    memory_limit: float | None
    speed_only: bool
    best: Prediction | None

    def fits(self, prediction: Prediction) -> bool:
        """Whether a rank can hold it, and a node what is offloaded."""
        return fits(prediction, self.cluster, self.memory_limit)

    def break_even(self, method: Method, times: float = 1.0) -> float:
        """Bytes a second of a node's link below which its average step is shorter than that of DDP with bf16 gradients,
        or so many times as fast; infinite where it always is, 0 where it never is."""
        return break_even_rate(self.workload, self.cluster, method, self.schedule, times=times)

    def of(self, method: Method) -> Prediction:
        """The prediction of `method`, asked for or not."""
        found = next((one for one in self.predictions if one.method == method), None)
        return predict(self.workload, self.cluster, method, self.schedule) if found is None else found

    def faster(self) -> list[Prediction]:
        """What fits and is faster than the best, fastest first: what would cost loss, or has not shown that it does
        not. One of each algorithm."""
        if self.best is None:
            return []
        ahead = [one for one in self.predictions if self.fits(one) and one.step_seconds < self.best.step_seconds]
        ahead.sort(key=lambda one: one.step_seconds)
        firsts = {one.method.algorithm: one for one in reversed(ahead)}
        return [one for one in ahead if firsts[one.method.algorithm] is one]


def plan(
    workload: Workload,
    cluster: Cluster,
    methods: Sequence[Method],
    schedule: Schedule | None = None,
    memory_limit: float | None = None,
    *,
    speed_only: bool = False,
) -> Plan:
    """Predict `methods` and recommend one: of those that keep the loss, unless only speed counts.

    Raises PlanError for no methods, or one that the cluster cannot run.
    """
    if not methods:
        raise PlanError("there is nothing to plan: give at least one method")
    if memory_limit is not None:
        require_positive("the memory limit", memory_limit)
    schedule = schedule or Schedule()
    predictions = tuple(predict(workload, cluster, method, schedule) for method in methods)
    fitting = [
        one for one in predictions if fits(one, cluster, memory_limit) and (speed_only or keeps_the_loss(one.method))
    ]
    best = min(fitting, key=lambda one: (one.step_seconds, one.memory_bytes), default=None)
    simple = next((one for one in fitting if one.method == BASELINE), None)
    if best and simple and not speed_only and simple.step_seconds < WORTH_IT * best.step_seconds:
        best = simple
    return Plan(workload, cluster, schedule, predictions, memory_limit, speed_only, best)


def fits(prediction: Prediction, cluster: Cluster, limit: float | None) -> bool:
    """Whether a rank has no more than `limit` bytes, and its node what is offloaded."""
    offloaded = all(held <= getattr(cluster.host, place) for place, held in prediction.offloaded.items() if held)
    return offloaded and (limit is None or prediction.memory_bytes <= limit)


def break_even_rate(
    workload: Workload, cluster: Cluster, method: Method, schedule: Schedule, *, times: float = 1.0
) -> float:
    """Bytes a second of a node's link below which `method`'s average step is shorter than `BASELINE`'s, or with `times`
    that many times as fast.

    Of the links between nodes, or inside where there is one node. Infinite where it is shorter at every rate from 10
    kB/s to 10 TB/s, and 0 where it is not even at the slowest.
    """

    def gain(log_rate: float) -> float:
        there = at_rate(cluster, math.exp(log_rate))
        ours = predict(workload, there, method, schedule).step_seconds
        return predict(workload, there, BASELINE, schedule).step_seconds - times * ours

    low, high = math.log(_SLOWEST), math.log(_FASTEST)
    looks = [low + (high - low) * look / _LOOKS for look in range(_LOOKS + 1)]
    losing = next((index for index, look in enumerate(looks) if gain(look) <= 0), None)
    if losing is None:
        return math.inf
    if losing == 0:
        return 0.0
    below, above = looks[losing - 1], looks[losing]
    for _ in range(_BISECTIONS):
        middle = (below + above) / 2
        if gain(middle) > 0:
            below = middle
        else:
            above = middle
    return math.exp(below)


def at_rate(cluster: Cluster, bytes_per_second: float) -> Cluster:
    """The cluster with other links between its nodes, or inside where there is one node."""
    if cluster.nodes == 1:
        return replace(cluster, inside=cluster.inside.with_rate(bytes_per_second))
    return replace(cluster, between=cluster.between.with_rate(bytes_per_second))


# Sizes of buckets: what each costs by itself, latency above all, against what the last one leaves with nothing to hide
# behind

_MEBIBYTE = 1 << 20
_TRIED = tuple(_MEBIBYTE << power for power in range(9))
_WORTH_SAYING = 0.03  # the part of a step that other buckets have to save


def better_buckets(plan: Plan) -> tuple[int, float] | None:
    """`bucket_bytes` with which the recommended optimizer's average step is shortest, and that in seconds; None where
    its own are as good, or given.

    At stage 0, where the size costs no memory. The smallest that is within a hundredth of the best.
    """
    best = plan.best
    if best is None or best.method.entry is None or best.method.stage or plan.schedule.bucket_bytes is not None:
        return None
    tried = {
        size: predict(plan.workload, plan.cluster, best.method, replace(plan.schedule, bucket_bytes=size)).step_seconds
        for size in _TRIED
    }
    shortest = min(tried.values())
    if shortest > (1 - _WORTH_SAYING) * best.step_seconds:
        return None
    size = next(size for size, seconds in tried.items() if seconds <= 1.01 * shortest)
    return size, tried[size]


# Failing nodes

_SILENCE = 10.0  # seconds after which thinwire.Elastic takes a worker for dead
_STEPS_LOST = 1  # that send again what a dead worker was missed in, at most
STORAGE_RATE = 1e9  # bytes a second of what checkpoints are written to, where no disk is named
RESTART = 120.0  # seconds until processes are up again, without the loading


@dataclass(frozen=True)
class Failures:
    """Shares of the time that are lost.

    Attributes:
        every: seconds between two failures somewhere in the job, on average.
        elastic: with 1-bit optimizers at stage 0 that are `elastic`: a death is noticed, a step sent again, and
            others wait while one that joins gets weights and state over its link.
        restarting: with checkpoints as often as is best: saving, half an interval lost a failure, and starting again.
        interval: seconds between these checkpoints (Young, 1974: the square root of 2 x saving x every).
    """

    every: float
    elastic: float
    restarting: float
    interval: float

    @classmethod
    def of(cls, plan: Plan, of_a_node: float) -> Failures:
        """For nodes that fail every `of_a_node` seconds, each by itself."""
        cluster, state = plan.cluster, STATE_BYTES * plan.workload.model.parameters
        every = of_a_node / cluster.nodes
        step = 0.0 if plan.best is None else plan.best.step_seconds
        joining = state / cluster.between.speed.bytes_per_second if cluster.nodes > 1 else 0.0
        host = cluster.host
        moving = state / (host.disk_rate if host is not None and host.disk else STORAGE_RATE)
        interval = math.sqrt(2 * moving * every)
        restarting = moving / interval + (interval / 2 + RESTART + moving) / every
        elastic = (_SILENCE + _STEPS_LOST * step + joining) / every
        return cls(every, min(elastic, 1.0), min(restarting, 1.0), interval)

    def in_words(self) -> str:
        """A line of an answer."""
        every, interval = map(seconds_in_words, (self.every, self.interval))
        elastic, restarting = 100 * self.elastic, 100 * self.restarting
        return (
            f"a node every {every}: elastic 1-bit steps lose {elastic:.2g}% of the time, starting again from "
            f"checkpoints every {interval} {restarting:.2g}%"
        )
