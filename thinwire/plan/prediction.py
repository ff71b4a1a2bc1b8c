"""Puts a model, a cluster and a method together: how long a step takes, where its time goes, and what a rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from thinwire.plan.cluster import Cluster
from thinwire.plan.errors import PlanError
from thinwire.plan.memory import memory_by_category
from thinwire.plan.methods import Method
from thinwire.plan.overlap import seconds_beside
from thinwire.plan.phases import Phase, phases
from thinwire.plan.schedule import Schedule
from thinwire.plan.workload import Workload

__all__ = ["Prediction", "StepPrediction", "predict"]


@dataclass(frozen=True)
class StepPrediction:
    """One step on one rank, in seconds; `step` = `compute` + `encode` + `exposed`.

    `compute`: forward, backward and the optimizer. `encode`: compression and decompression, casts, sums of owners.
    `wire`: both links, one transfer after the other. `exposed`: the part of it that nothing hides. `bytes_sent`: by one
    rank, as its Communicator counts them. `bytes_between`: by all ranks of a node, to other nodes.
    """

    step: float
    compute: float
    encode: float
    wire: float
    exposed: float
    bytes_sent: float
    bytes_between: float

    @property
    def waiting(self) -> float:
        """The part of the step that the processor waits for the network."""
        return self.exposed / self.step if self.step else 0.0


@dataclass(frozen=True)
class Prediction:
    """What a method will do.

    `average`: of the whole run's steps; `steady`: of those after the warmup, or of all where there are no others.
    `phases`: of one step of each kind, by name, and `shares`, the part of the steps that are of it. `memory`: bytes a
    rank holds, by category, when it holds most.
    """

    method: Method
    average: StepPrediction
    steady: StepPrediction
    phases: Mapping[str, StepPrediction]
    shares: Mapping[str, float]
    memory: Mapping[str, float]

    @property
    def step_seconds(self) -> float:
        """Of an average step of the run."""
        return self.average.step

    @property
    def memory_bytes(self) -> float:
        """Bytes a rank holds when it holds most."""
        return sum(self.memory.values())


def predict(workload: Workload, cluster: Cluster, method: Method, schedule: Schedule | None = None) -> Prediction:
    """Predict a step of `workload` on `cluster` with `method`, averaged over the run of `schedule`.

    Takes the same short time for 10,000 ranks as for 2. Raises PlanError for a hierarchy on a cluster without one.
    """
    if method.hierarchical and not cluster.has_hierarchy:
        raise PlanError(
            f"{method.name} needs several nodes of several ranks, not {cluster.nodes} of {cluster.ranks_per_node}"
        )
    workload, cluster = _with_shared_cores(workload, cluster)
    run = schedule or Schedule()
    parts = phases(method, workload, cluster, run)
    steps = [_step(phase, workload, cluster) for phase in parts]
    shares = [phase.share for phase in parts]
    steady_shares = [0.0 if phase.warm else phase.share for phase in parts]
    held = [memory_by_category(method, workload, cluster, run, warm=phase.warm) for phase in parts]
    return Prediction(
        method,
        _average(steps, shares),
        _average(steps, steady_shares if any(steady_shares) else shares),
        {phase.name: step for phase, step in zip(parts, steps, strict=True)},
        {phase.name: phase.share for phase in parts},
        max(held, key=lambda categories: sum(categories.values())),
    )


def _with_shared_cores(workload: Workload, cluster: Cluster) -> tuple[Workload, Cluster]:
    """What every rank computes takes as many times as long as ranks share a core."""
    times = cluster.ranks_a_core
    if times == 1:
        return workload, cluster
    update = None if workload.update_seconds is None else times * workload.update_seconds
    slower = replace(
        workload,
        forward_seconds=times * workload.forward_seconds,
        backward_seconds=times * workload.backward_seconds,
        update_seconds=update,
    )
    return slower, replace(cluster, processor=cluster.processor.slower(times))


def _step(phase: Phase, workload: Workload, cluster: Cluster) -> StepPrediction:
    overlap = cluster.processor.overlap
    earlier = workload.accumulation - 1
    forward = seconds_beside(workload.forward_seconds, phase.forward, overlap)
    backward = seconds_beside(workload.backward_seconds, phase.backward, overlap)
    last_backward = seconds_beside(workload.backward_seconds, phase.buckets, overlap)
    compute = workload.accumulation * (workload.forward_seconds + workload.backward_seconds) + phase.update
    cost = phase.forward.total * workload.accumulation + phase.backward.total * earlier + phase.buckets.total
    step = workload.accumulation * forward + earlier * backward + last_backward + phase.update
    # What computation hides of buckets cannot hide anything else.
    spare = max(0.0, compute - max(0.0, compute + cost.total - step))
    step += phase.after.total - min(phase.after.wire, overlap * phase.overlap * spare)
    cost += phase.after
    # What rounding leaves of such sums is no exposure.
    exposed = min(max(0.0, step - compute - cost.codec), cost.wire)
    return StepPrediction(
        compute + cost.codec + exposed, compute, cost.codec, cost.wire, exposed, cost.bytes_sent, cost.bytes_between
    )


def _average(steps: Sequence[StepPrediction], shares: Sequence[float]) -> StepPrediction:
    total = sum(shares)
    return StepPrediction(
        *(
            sum(share * getattr(step, one.name) for step, share in zip(steps, shares, strict=True)) / total
            for one in fields(StepPrediction)
        )
    )
