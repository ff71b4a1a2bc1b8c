"""Shows a plan: as a table for people, as JSON for programs."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from thinwire.plan.buckets import better_buckets
from thinwire.plan.losses import loss_of
from thinwire.plan.methods import DILOCO, Method
from thinwire.plan.prediction import Prediction, StepPrediction
from thinwire.plan.published_losses import SOURCE, local_updates_loss
from thinwire.plan.recommendation import BASELINE, Plan
from thinwire.plan.units import rate_in_words, seconds_in_words, size_in_words

__all__ = ["as_json", "as_table", "outer_in_words"]

_ROUNDING = 1e-9
_HEADINGS = ("step ms", "compute", "encode", "wire", "exposed", "MB sent", "MB node", "GB held")


def as_table(plan: Plan) -> str:
    """Of all methods, the phases of each that has several, and the break-even rates."""
    workload, cluster = plan.workload, plan.cluster
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
        *(_break_even(one.method, plan) for one in plan.predictions if one.method.sends_less),
        *(f"{one.method.name}: {text}" for one in plan.predictions if (text := outer_in_words(plan, one)) is not None),
    ]
    return "\n".join(lines)


def as_json(plan: Plan) -> dict[str, Any]:
    """The same in seconds and bytes; a break-even rate that is infinite is null."""
    workload, cluster = plan.workload, plan.cluster
    buckets = better_buckets(plan)
    return {
        "model": workload.model.name,
        "parameters": workload.model.parameters,
        "dtype": workload.dtype,
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "memory_limit": plan.memory_limit,
        "recommended": plan.best.method.name if plan.best is not None else None,
        "better_buckets": None if buckets is None else asdict(buckets),
        "forward_seconds": workload.forward_seconds,
        "backward_seconds": workload.backward_seconds,
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
    measured = loss_of(prediction.method)
    described["measured_loss"] = None if measured is None else asdict(measured)
    if prediction.method.algorithm == DILOCO:
        workers = prediction.method.workers(plan.cluster)
        loss = local_updates_loss(plan.workload.model.parameters, workers)
        described["published_loss"] = {"difference": loss, "beside": "data parallel", "source": SOURCE}
    if prediction.method.sends_less:
        rate = plan.break_even(prediction.method)
        described["break_even_bytes_per_second"] = None if math.isinf(rate) else rate
    return described


def outer_in_words(plan: Plan, prediction: Prediction) -> str | None:
    """Whether a fragment's way hides behind the steps that it is under way; None where there are no outer steps."""
    step, local = prediction.phases.get("outer"), prediction.phases.get("local")
    if step is None:
        return None
    overlap, after = plan.schedule.outer.overlap, (local or step).compute
    inside = 0.0 if local is None else local.wire
    several = plan.cluster.nodes > 1
    sent = size_in_words(step.bytes_between if several else step.bytes_sent)
    way = seconds_in_words(step.wire - inside)
    text = f"{sent} a {'node' if several else 'rank'} leave at once, {way} on the wire"
    steps = f"{overlap} step{'s' if overlap != 1 else ''}"
    exposed_alone = 0.0 if local is None else local.exposed
    if step.exposed - exposed_alone <= _ROUNDING * step.wire:
        return f"{text}, hidden behind {steps}"
    stall = seconds_in_words(step.exposed)
    needed = math.ceil((step.wire - inside) / after / (plan.cluster.processor.overlap or 1.0)) if after else 0
    if overlap < needed < plan.schedule.outer.every:
        return f"{text}: training stalls {stall} beyond {steps}; an overlap of {needed} would hide it"
    return f"{text}: training stalls {stall} beyond {steps}; only a longer interval or fewer bits help"


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


def _break_even(method: Method, plan: Plan) -> str:
    rate = plan.break_even(method)
    if math.isinf(rate):
        return f"{method.name} beats {BASELINE.name} at every link rate"
    if rate == 0:
        return f"{method.name} beats {BASELINE.name} at no link rate"
    return f"{method.name} beats {BASELINE.name} below {rate_in_words(rate)} a node"
