"""How many bytes a rank holds with each method: ZeRO's formulas, and beside them what is not sharded."""

from __future__ import annotations



from thinwire.optim.sharded.memory import frozen_state_formula
from thinwire.plan.cluster import Cluster
from thinwire.plan.methods import Method
from thinwire.plan.workload import Workload
from thinwire.zero.state_formula import model_state_formula

__all__ = ["memory_by_category"]

_FP32 = 4


def memory_by_category(method: Method, workload: Workload, cluster: Cluster, *, warm: bool) -> dict[str, float]:
    """Bytes a rank holds between two steps, by category; `warm` before 1-bit Adam freezes.

    Sharded states are those of `thinwire.zero.memory` and `thinwire.optim.sharded.memory`. Unsharded 1-bit Adam adds a
    payload, the average of the own shard and, once frozen and in its place, residuals: the worker's of what it sends,
    the owner's of its shard. 0/1 Adam adds its sum of local updates. DDP keeps gradients twice, in buckets too;
    PowerSGD an error as large as the model, and its factors.
    """
    parameters = workload.model.parameters
    frozen_on_shards = method.algorithm == "onebit-adam" and method.stage > 0 and not warm
    size = workload.element_bytes
    if frozen_on_shards:
        held = frozen_state_formula(parameters, cluster.ranks, element_bytes=size)
    else:
        held = model_state_formula(method.stage, parameters, cluster.ranks, element_bytes=size)
    if method.algorithm in ("ddp-fp32", "ddp-bf16", "powersgd"):
        held["buckets"] = parameters * workload.element_bytes
    if method.rank is not None:
        factors = sum(one.low_rank_elements(method.rank) for one in workload.model.matrices)
        held["residuals"] = parameters * _FP32
        held["factors"] = factors * _FP32
    if method.is_one_bit and method.stage == 0:
        held["payload"] = parameters * _FP32
        sent = parameters / (cluster.ranks_per_node if method.hierarchical else 1)
        owned = parameters / cluster.ranks
        if warm:
            held["average"] = owned * _FP32
        else:
            held["residuals"] = (sent + owned) * _FP32
    if method.algorithm == "zero-one-adam":
        held["local updates"] = parameters * _FP32
    if workload.activations is not None:
        held["activations"] = workload.activations.nbytes(workload.dtype)
    return held
