"""How many bytes a rank holds with each method: ZeRO's formulas, and beside them what is not sharded."""

from __future__ import annotations

from thinwire.optim.registry import OptimizerEntry
from thinwire.optim.sharded.packed_checkpoint import frozen_state_formula
from thinwire.plan.cluster import Cluster
from thinwire.plan.methods import DILOCO, Method
from thinwire.plan.schedule import Schedule
from thinwire.plan.workload import Workload
from thinwire.zero.state_formula import model_state_formula

__all__ = ["memory_by_category"]

_FP32 = 4


def memory_by_category(
    method: Method, workload: Workload, cluster: Cluster, schedule: Schedule, *, warm: bool
) -> dict[str, float]:
    """Bytes a rank holds between two steps, by category; `warm` before a 1-bit optimizer freezes.

    DDP keeps gradients twice, in buckets too; PowerSGD an error as large as the model, and its factors.
    """
    parameters = workload.model.parameters
    entry = method.entry
    if entry is not None:
        held = _one_bit_state(entry, method, workload, cluster, warm=warm)
    else:
        held = model_state_formula(method.stage, parameters, cluster.ranks, element_bytes=workload.element_bytes)
        if method.algorithm == DILOCO:
            held |= _outer_state(method, workload, cluster, schedule)
        elif not method.stage:
            held["buckets"] = parameters * workload.element_bytes
    if method.rank is not None:
        factors = sum(one.low_rank_elements(method.rank) for one in workload.model.matrices)
        held["residuals"] = parameters * _FP32
        held["factors"] = factors * _FP32
    if workload.activations is not None:
        held["activations"] = workload.activations.nbytes(workload.dtype)
    return held


def _outer_state(method: Method, workload: Workload, cluster: Cluster, schedule: Schedule) -> dict[str, float]:
    """Beside what a worker trains with: outer weights, the owner's part of their momentum, what codecs have lost, and a
    fragment under way."""
    parameters, workers, outer = workload.model.parameters, method.workers(cluster), schedule.outer
    inside = cluster.ranks_per_node if method.hierarchical else 1
    owned = parameters / (workers * inside)
    held = {"outer weights": parameters * _FP32 * 1.0, "outer momentum": owned * _FP32}
    if workers > 1:
        blocks = workload.model.blocks
        held["under way"] = parameters * _FP32 / outer.fragments_of(None if blocks is None else blocks.layers)
        if outer.codec != "none":
            kept = _FP32 if method.hierarchical else _FP32 / 2
            held["residuals"] = parameters / inside * kept + owned * _FP32
    return held


def _one_bit_state(
    entry: OptimizerEntry, method: Method, workload: Workload, cluster: Cluster, *, warm: bool
) -> dict[str, float]:
    parameters, size = workload.model.parameters, workload.element_bytes
    if method.stage == 0:
        return _replicated(entry, method, workload, cluster, warm=warm)
    if _keeps_whole_momentum(entry):
        return _half_sharded(entry, parameters, size, cluster.ranks, warm=warm)
    if warm:
        return model_state_formula(method.stage, parameters, cluster.ranks, element_bytes=size)
    return frozen_state_formula(
        parameters, cluster.ranks, element_bytes=size, fresh_variance=_has_fresh_variance(entry)
    )


def _replicated(
    entry: OptimizerEntry, method: Method, workload: Workload, cluster: Cluster, *, warm: bool
) -> dict[str, float]:
    """Beside plain state a payload, and the average of the own shard while averages are exact, then residuals: the
    worker's of what it sends, the owner's of its shard. Local steps take their sum and, frozen, the weights that they
    began with."""
    parameters = workload.model.parameters
    vectors = _vectors(entry) + (not warm and _has_fresh_variance(entry))
    held = model_state_formula(
        0, parameters, cluster.ranks, element_bytes=workload.element_bytes, state_bytes=_FP32 * vectors
    )
    held["payload"] = parameters * _FP32
    sent = parameters / (cluster.ranks_per_node if method.hierarchical else 1)
    owned = parameters / cluster.ranks
    if warm and not entry.local_steps:
        held["average"] = owned * _FP32
    else:
        held["residuals"] = (sent + owned) * _FP32
    if entry.local_steps:
        begun_with = not warm and workload.element_bytes == _FP32  # masters are these weights in 16 bits
        held["local updates"] = parameters * _FP32 * (1 + begun_with)
    return held


def _half_sharded(entry: OptimizerEntry, parameters: int, size: int, ranks: int, *, warm: bool) -> dict[str, float]:
    """Stage 1 of what takes its own whole momentum on every rank: what it does not take is on the owner."""
    shared = 1 / ranks
    each = {
        "weights": float(size),
        "masters": (0 if size == _FP32 else _FP32) * shared,
        "gradients": float(size),
        "optimizer state": float(_FP32),
        "residuals": size + _FP32 * shared,
    }
    if entry.local_steps:
        each["optimizer state"] += _FP32 * shared if warm else size
        each["local updates"] = float(size if warm else size + _FP32)
    return {category: parameters * factor for category, factor in each.items()}


def _vectors(entry: OptimizerEntry) -> int:
    """Of fp32 state as long as the weights: a momentum, and a variance where there is one to freeze."""
    return 1 if entry.freeze_option is None else 2


def _has_fresh_variance(entry: OptimizerEntry) -> bool:
    """Whether a second variance follows the frozen one: what scales whole layers has one."""
    return not entry.elementwise


def _keeps_whole_momentum(entry: OptimizerEntry) -> bool:
    """Whether its sharded state cannot be packed: local steps, or a step that is not linear in what comes back."""
    return entry.local_steps or entry.freeze_option is None
