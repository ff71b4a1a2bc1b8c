"""Compares all methods on one cluster: which to take, and on how thin a wire 1 bit begins to pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinwire.plan.cluster import Cluster
from thinwire.plan.errors import PlanError, require_positive
from thinwire.plan.losses import keeps_the_loss
from thinwire.plan.methods import Method
from thinwire.plan.prediction import Prediction, predict
from thinwire.plan.schedule import Schedule
from thinwire.plan.workload import Workload

__all__ = ["BASELINE", "WORTH_IT", "Plan", "at_rate", "break_even_rate", "plan"]

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
        """Whether a rank can hold it."""
        return self.memory_limit is None or prediction.memory_bytes <= self.memory_limit

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
        one
        for one in predictions
        if (memory_limit is None or one.memory_bytes <= memory_limit) and (speed_only or keeps_the_loss(one.method))
    ]
    best = min(fitting, key=lambda one: (one.step_seconds, one.memory_bytes), default=None)
    simple = next((one for one in fitting if one.method == BASELINE), None)
    if best and simple and not speed_only and simple.step_seconds < WORTH_IT * best.step_seconds:
        best = simple
    return Plan(workload, cluster, schedule, predictions, memory_limit, speed_only, best)


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
