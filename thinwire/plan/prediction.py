"""Puts a model, a cluster and a method together: how long a step takes, where its time goes, and what a rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from thinwire.optim.registry import OptimizerEntry
from thinwire.plan.cluster import Cluster, seconds_beside
from thinwire.plan.methods import DILOCO, ONEBIT_MUON, ROUNDED_WIRES, Method, Schedule
from thinwire.plan.phases import Phase, Setting, phases
from thinwire.plan.units import PlanError
from thinwire.plan.workload import Workload
from thinwire.zero.bucket_layout import frozen_state_formula, model_state_formula

# Memory: ZeRO's formulas, and beside them what is not sharded

_FP32 = 4


def _memory(setting: Setting, *, warm: bool) -> dict[str, float]:
    """Bytes a rank holds between two steps, by category; `warm` before a 1-bit optimizer freezes.

    DDP keeps gradients twice, in buckets too; PowerSGD an error as large as the model, and its factors.
    """
    method, workload, parameters = setting.method, setting.workload, setting.parameters
    if method.algorithm == ONEBIT_MUON:
        held = _owned_state(setting)
    elif method.entry is not None:
        held = _one_bit_state(setting, method.entry, warm=warm)
    else:
        ranks = setting.cluster.ranks
        held = model_state_formula(method.stage, parameters, ranks, element_bytes=workload.element_bytes)
        if method.algorithm == DILOCO:
            held |= _outer_state(setting)
            if setting.schedule.outer.inner == "Muon":  # has no second moment of matrices
                held["optimizer state"] = (parameters + workload.model.last_elements) * _FP32 * 1.0
        elif not method.stage:
            held["buckets"] = parameters * workload.element_bytes
    if method.rank is not None:
        factors = sum(one.low_rank_elements(method.rank) for one in workload.model.matrices)
        held |= {"residuals": parameters * _FP32, "factors": factors * _FP32}
    if method.stage == 3:
        held |= _whole_at_stage_3(setting)
    if workload.activations is not None:
        held["activations"] = workload.activations.nbytes(workload.dtype, recompute=workload.recompute)
    return held


def _whole_at_stage_3(setting: Setting) -> dict[str, float]:
    """What of stage 3 is no shard of all ranks: two layers that are gathered, and the gradient of one; with codecs and
    nodes the copy of a node, and residuals."""
    method, parameters, size = setting.method, setting.parameters, setting.workload.element_bytes
    blocks, lane = setting.workload.model.blocks, float(parameters)
    held = {} if blocks is None else {"layers in use": 3.0 * size * parameters / blocks.layers}
    if method.hierarchical:
        lane = parameters / setting.cluster.ranks_per_node
        held["copy in the node"] = lane * size
    return held | ({} if method.gradients is None else {"residuals": lane * _FP32})


def _offloaded(setting: Setting, held: dict[str, float]) -> dict[str, float]:
    """Take out of what a rank holds what its node does, and give that: bytes of the memory and of the disk."""
    place, ranks = setting.method.offload, setting.cluster.ranks_per_node
    if place is None:
        return {}
    if setting.workload.element_bytes == _FP32 and setting.method.stage < 3:  # else these are the weights
        held["master weights"] = setting.parameters * _FP32 / setting.cluster.ranks
    moved = {"memory": 0.0, "disk": 0.0}
    moved[place] += ranks * (held.pop("master weights") + held.pop("optimizer state"))
    if place == "disk":  # steps are made beside what was there
        moved[place] = 2 * moved[place] + ranks * setting.parameters * setting.shown / setting.cluster.ranks
    if setting.gathers_from_host:
        moved["memory"] += ranks * (held.pop("weights") + held.pop("gradients"))
    return moved


def _outer_state(setting: Setting) -> dict[str, float]:
    """Beside what a worker trains with: outer weights, the owner's part of their momentum, what codecs have lost, and a
    fragment in flight."""
    method, parameters, outer = setting.method, setting.parameters, setting.schedule.outer
    workers = method.workers(setting.cluster)
    inside = setting.cluster.ranks_per_node if method.hierarchical else 1
    owned = parameters / (workers * inside)
    held = {"outer weights": parameters * _FP32 * 1.0, "outer momentum": owned * _FP32}
    model = setting.workload.model
    if shared := sum(outer.shared_elements(kind, model) for kind in outer.share):
        held["shared state"] = shared * _FP32 * 1.0
        parameters += shared
        owned += shared / (workers * inside)
        held["outer momentum"] = owned * _FP32
    if workers > 1:
        held["in flight"] = parameters * _FP32 / outer.fragments_of(setting.workload.model)
        if outer.codec != "none":
            kept = _FP32 if method.hierarchical else _FP32 / 2
            held["residuals"] = parameters / inside * kept + owned * _FP32
    return held


def _one_bit_state(setting: Setting, entry: OptimizerEntry, *, warm: bool) -> dict[str, float]:
    method, cluster = setting.method, setting.cluster
    parameters, size, ranks = setting.parameters, setting.workload.element_bytes, cluster.ranks
    rounds = setting.schedule.warmup_wire in ROUNDED_WIRES  # which keep residuals, as compressed steps do
    # What scales whole layers has a second variance, which follows the frozen one.
    fresh_variance = not entry.elementwise
    if method.stage == 0:
        vectors = (1 if entry.freeze_option is None else 2) + (not warm and fresh_variance)
        held = model_state_formula(0, parameters, ranks, element_bytes=size, state_bytes=_FP32 * vectors)
        held["payload"] = parameters * _FP32
        if warm and not entry.local_steps and not rounds:
            held["average"] = parameters / ranks * _FP32  # of the own shard
        else:  # the worker's of what it sends, the owner's of its shard
            sent = parameters / (cluster.ranks_per_node if method.hierarchical else 1)
            both = 2 if warm and rounds and entry.local_steps else 1  # of the warmup, and of what local steps send
            held["residuals"] = (sent + parameters / ranks) * _FP32 * both
        if entry.local_steps:  # their sum and, frozen, the weights that they began with: in 16 bits the master weights
            held["local updates"] = parameters * _FP32 * (1 + (not warm and size == _FP32))
        return held
    lanes = cluster.ranks_per_node if method.hierarchical else 1
    if entry.local_steps or entry.freeze_option is None:
        return _half_sharded(entry, parameters, size, ranks, lanes, warm=warm)
    if warm:
        held = model_state_formula(method.stage, parameters, ranks, element_bytes=size)
        owned = {"payload": parameters * _FP32 * 1.0, "average": parameters / ranks * _FP32}
        lost = owned["payload"] * (2 / lanes if lanes > 1 else 1)  # of a lane, and the sum that becomes the next
        return held | owned | {"residuals": lost} if rounds else held
    return frozen_state_formula(parameters, ranks, element_bytes=size, fresh_variance=fresh_variance, lanes=lanes)


def _owned_state(setting: Setting) -> dict[str, float]:
    """Of 1-bit Muon, at every stage: what a rank's own payloads begin with is whole on it, the rest on its owners. What
    comes last has AdamW's second moment."""
    workload, cluster = setting.workload, setting.cluster
    # By node a rank keeps the residual of its lane, and as much memory for the sum that it is of.
    kept = 2 / cluster.ranks_per_node if setting.method.hierarchical else 1
    last = workload.model.last_elements
    padded = workload.model.padded_elements(cluster.ranks) + last
    shared = _FP32 / cluster.ranks
    return {
        "weights": float(padded * workload.element_bytes),
        "gradients": float(workload.model.parameters * workload.element_bytes),
        "payload and residuals": padded * _FP32 * (1.0 + kept),
        "master weights": padded * shared,
        "averages": padded * shared,
        "optimizer state": (workload.model.parameters + last) * shared,
    }


def _half_sharded(
    entry: OptimizerEntry, parameters: int, size: int, ranks: int, lanes: int, *, warm: bool
) -> dict[str, float]:
    """Stage 1 of what cannot be packed, as it steps locally or not linearly in what comes back: only what a rank's own
    payloads begin with is whole on it."""
    shared = 1 / ranks
    each = {
        "weights": float(size),
        "master weights": (0 if size == _FP32 else _FP32) * shared,
        "gradients": float(size),
        "optimizer state": float(_FP32),
        "residuals": (size if lanes == 1 else _FP32 / lanes) + _FP32 * shared,
    }
    if entry.local_steps:
        each["optimizer state"] += _FP32 * shared if warm else size
        each["local updates"] = float(size if warm else size + _FP32)
    return {category: parameters * factor for category, factor in each.items()}


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
    rank holds, by category, when it holds most; `offloaded`: that its node holds in `memory` and on the `disk`.
    """

    method: Method
    average: StepPrediction
    steady: StepPrediction
    phases: Mapping[str, StepPrediction]
    shares: Mapping[str, float]
    memory: Mapping[str, float]
    offloaded: Mapping[str, float]

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
    times = cluster.ranks_a_core
    if times > 1:  # what every rank computes takes as many times as long as ranks share a core
        cluster = replace(cluster, processor=cluster.processor.slower(times))
        workload = replace(
            workload,
            forward_seconds=times * workload.forward_seconds,
            backward_seconds=times * workload.backward_seconds,
            update_seconds=None if workload.update_seconds is None else times * workload.update_seconds,
        )
    if method.offload is not None and not (cluster.host and getattr(cluster.host, method.offload)):
        raise PlanError(f"{method.name} needs a host with {method.offload}: give the cluster one")
    setting = Setting(method, workload, cluster, schedule or Schedule())
    parts = phases(setting)
    steps = [_step(phase, workload, cluster) for phase in parts]
    shares = [phase.share for phase in parts]
    steady_shares = [0.0 if phase.warm else phase.share for phase in parts]
    held = [_memory(setting, warm=phase.warm) for phase in parts]
    most = max(held, key=lambda categories: sum(categories.values()))
    offloaded = _offloaded(setting, most)
    return Prediction(
        method,
        _average(steps, shares),
        _average(steps, steady_shares if any(steady_shares) else shares),
        {phase.name: step for phase, step in zip(parts, steps, strict=True)},
        {phase.name: phase.share for phase in parts},
        most,
        offloaded,
    )


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
