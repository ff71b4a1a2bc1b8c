"""Compares all methods on one cluster: which is the fastest that fits, and on how thin a wire 1 bit begins to pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinwire.plan.cluster import Cluster
from thinwire.plan.errors import PlanError, require_positive
from thinwire.plan.methods import Method
from thinwire.plan.prediction import Prediction, predict
from thinwire.plan.schedule import Schedule
from thinwire.plan.workload import Workload

__all__ = ["BASELINE", "Plan", "break_even_rate", "plan"]

BASELINE = Method("ddp-bf16")

# Bytes a second: the rates among which a break-even is looked for, and how finely.
_SLOWEST, _FASTEST = 1e4, 1e13
_LOOKS = 60
_BISECTIONS = 30


@dataclass(frozen=True)
class Plan:
    """Predictions of every method asked for, in that order.

    `best`: the fastest average step among those that fit into `memory_limit` bytes a rank (None: any fits); None where
    none does. `break_even`: bytes a second of a node's link below which the average step of each 1-bit method is
    shorter than that of DDP with bf16 gradients; infinite where it always is, 0 where it never is.
    """

    predictions: tuple[Prediction, ...]
    memory_limit: float | None
    best: Prediction | None
    break_even: dict[Method, float]

    def fits(self, prediction: Prediction) -> bool:
        """Whether a rank can hold it."""
        return self.memory_limit is None or prediction.memory_bytes <= self.memory_limit


def plan(
    workload: Workload,
    cluster: Cluster,
    methods: Sequence[Method],
    schedule: Schedule | None = None,
    memory_limit: float | None = None,
) -> Plan:
    """Predict `methods` and recommend one. Raises PlanError for no methods, or one that the cluster cannot run."""
    if not methods:
        raise PlanError("there is nothing to plan: give at least one method")
    if memory_limit is not None:
        require_positive("the memory limit", memory_limit)
    schedule = schedule or Schedule()
    predictions = tuple(predict(workload, cluster, method, schedule) for method in methods)
    fitting = [one for one in predictions if memory_limit is None or one.memory_bytes <= memory_limit]
    best = min(fitting, key=lambda one: (one.step_seconds, one.memory_bytes), default=None)
    break_even = {
        method: break_even_rate(workload, cluster, method, schedule) for method in methods if method.is_one_bit
    }
    return Plan(predictions, memory_limit, best, break_even)


def break_even_rate(
    workload: Workload, cluster: Cluster, method: Method, schedule: Schedule, baseline: Method = BASELINE
) -> float:
    """Bytes a second of a node's link below which `method`'s average step is shorter than `baseline`'s.

    Of the links between nodes, or inside where there is one node. Infinite where it is shorter at every rate from 10
    kB/s to 10 TB/s, and 0 where it is not even at the slowest.
    """

    def gain(log_rate: float) -> float:
        there = _at_rate(cluster, math.exp(log_rate))
        ours = predict(workload, there, method, schedule).step_seconds
        return predict(workload, there, baseline, schedule).step_seconds - ours

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


def _at_rate(cluster: Cluster, bytes_per_second: float) -> Cluster:
    if cluster.nodes == 1:
        return replace(cluster, inside=cluster.inside.with_rate(bytes_per_second))
    return replace(cluster, between=cluster.between.with_rate(bytes_per_second))
