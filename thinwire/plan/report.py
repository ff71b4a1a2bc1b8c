"""Shows a plan: as a table for people, as JSON for programs."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from thinwire.plan.cluster import Cluster
from thinwire.plan.prediction import Prediction, StepPrediction
from thinwire.plan.recommendation import BASELINE, Plan
from thinwire.plan.workload import Workload

__all__ = ["as_json", "as_text"]

_HEADINGS = ("step ms", "compute", "encode", "wire", "exposed", "MB sent", "MB node", "GB held")
_BITS = 8


def as_text(plan: Plan, workload: Workload, cluster: Cluster) -> str:
    """The table of all methods, the phases of each that has several, the recommendation and the break-even rates."""
    width = max(_longest(plan), len("method")) + 2
    lines = [
        f"{workload.model.name}, {workload.model.parameters:,} parameters in {workload.dtype}, "
        f"on {cluster.nodes} nodes of {cluster.ranks_per_node}",
        "",
        f"{'method':<{width}}" + "".join(f"{heading:>10}" for heading in _HEADINGS),
    ]
    for prediction in plan.predictions:
        held = f"{prediction.memory_bytes / 1e9:.2f}" + ("" if plan.fits(prediction) else "!")
        lines.append(f"{prediction.method.name:<{width}}" + _cells(prediction.average, held))
        if len(prediction.phases) > 1:
            for name, step in prediction.phases.items():
                label = f"  {name}, {_percent(prediction.shares[name])}"
                lines.append(f"{label:<{width}}" + _cells(step, ""))
    lines += [
        "",
        "Times in ms of one step, averaged over the run; below, its phases. Exposed: the part of the wire that nothing",
        "hides. MB sent by a rank, and by a node to others. GB held by a rank; ! is more than there is.",
        "",
        _recommendation(plan),
        *(_break_even(method.name, rate) for method, rate in plan.break_even.items()),
    ]
    return "\n".join(lines)


def as_json(plan: Plan, workload: Workload, cluster: Cluster) -> dict[str, Any]:
    """The same in seconds and bytes; a break-even rate that is infinite is null."""
    return {
        "model": workload.model.name,
        "parameters": workload.model.parameters,
        "dtype": workload.dtype,
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "memory_limit": plan.memory_limit,
        "recommended": plan.best.method.name if plan.best is not None else None,
        "predictions": [_prediction_as_json(plan, prediction) for prediction in plan.predictions],
    }


def _prediction_as_json(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    described: dict[str, Any] = {
        "method": prediction.method.name,
        **asdict(prediction.method),
        "average": asdict(prediction.average),
        "phases": {
            name: {"share": prediction.shares[name], **asdict(step)} for name, step in prediction.phases.items()
        },
        "memory": dict(prediction.memory),
        "memory_bytes": prediction.memory_bytes,
        "fits": plan.fits(prediction),
    }
    if prediction.method in plan.break_even:
        rate = plan.break_even[prediction.method]
        described["break_even_bytes_per_second"] = None if math.isinf(rate) else rate
    return described


def _longest(plan: Plan) -> int:
    labels = [prediction.method.name for prediction in plan.predictions]
    for prediction in plan.predictions:
        labels += [f"  {name}, {_percent(share)}" for name, share in prediction.shares.items()]
    return max(map(len, labels))


def _cells(step: StepPrediction, held: str) -> str:
    milliseconds = (step.step, step.compute, step.encode, step.wire, step.exposed)
    cells = [_short(1e3 * value) for value in milliseconds]
    cells += [_short(value / 1e6) for value in (step.bytes_sent, step.bytes_between)]
    return "".join(f"{cell:>10}" for cell in (*cells, held))


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}% of steps"


def _recommendation(plan: Plan) -> str:
    if plan.best is None:
        assert plan.memory_limit is not None
        least = min(plan.predictions, key=lambda one: one.memory_bytes)
        return (
            f"Nothing fits into {plan.memory_limit / 1e9:.2f} GB a rank: {least.method.name} needs least, "
            f"{least.memory_bytes / 1e9:.2f} GB"
        )
    best = plan.best
    text = f"Recommended: {best.method.name}, {1e3 * best.step_seconds:.1f} ms a step, {best.memory_bytes / 1e9:.2f} GB"
    baseline = next((one for one in plan.predictions if one.method == BASELINE), None)
    if baseline is not None and baseline is not best:
        text += f"; {baseline.step_seconds / best.step_seconds:.2f}x as fast as {BASELINE.name}"
    return text


def _break_even(name: str, rate: float) -> str:
    if math.isinf(rate):
        return f"{name} beats {BASELINE.name} at every link rate"
    if rate == 0:
        return f"{name} beats {BASELINE.name} at no link rate"
    return f"{name} beats {BASELINE.name} below {_BITS * rate / 1e9:.3g} Gb/s a node"
