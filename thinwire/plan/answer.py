"""A plan as people and programs read it: the short answer with the line to write, a table, JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from thinwire.plan.cluster import Cluster
from thinwire.plan.methods import DILOCO, POWERSGD, SHARDED_ADAM, Method, OuterSchedule, Schedule
from thinwire.plan.prediction import Prediction, StepPrediction, predict
from thinwire.plan.recommendation import (
    BASELINE,
    SMALLEST,
    SOURCE,
    WORTH_IT,
    Plan,
    local_updates_loss,
    loss_in_words,
    loss_of,
)
from thinwire.plan.units import rate_in_words, seconds_in_words, size_in_words

__all__ = [
    "BucketAdvice",
    "as_answer",
    "as_json",
    "as_table",
    "better_buckets",
    "code_for",
    "outer_in_words",
    "title_of",
]


_DDP = "model = DistributedDataParallel(model)"


def title_of(method: Method) -> str:
    """What a sentence calls it."""
    if method.algorithm == POWERSGD:
        return f"PowerSGD of rank {method.rank}"
    named = {
        "ddp-fp32": "DDP in fp32",
        "ddp-bf16": "DDP with its bf16 hook",
        SHARDED_ADAM: "AdamW on shards",
        DILOCO: "DiLoCo",
    }
    title = method.entry.name if method.entry is not None else named[method.algorithm]
    if method.stage:
        title += f" at ZeRO stage {method.stage}"
    return f"{title}, by node" if method.hierarchical else title


def code_for(method: Method, cluster: Cluster, schedule: Schedule, *, steps_given: bool = False) -> str:
    """The line. `steps_given`: the schedule's steps are the run's own, so that the step of the freeze is known."""
    if method.algorithm == "ddp-fp32":
        return _DDP
    if method.algorithm == "ddp-bf16":
        return f"{_DDP}; model.register_comm_hook(None, default_hooks.bf16_compress_hook)"
    if method.algorithm == POWERSGD:
        state = f"PowerSGDState(None, {method.rank}, start_powerSGD_iter={schedule.powersgd_start})"
        return f"{_DDP}; model.register_comm_hook(powerSGD_hook.{state}, powerSGD_hook.powerSGD_hook)"
    if method.algorithm == SHARDED_ADAM:
        if method.stage == 3:
            return 'thinwire.initialize(model=model, config={..., "zero_optimization": {"stage": 3}})'
        return f"thinwire.ShardedOptimizer(model.parameters(), torch.optim.AdamW, stage={method.stage}, lr=lr)"
    if method.algorithm == DILOCO:
        given, usual = schedule.outer, OuterSchedule()
        options = ["lr=lr", f"every={given.every}"]
        options += [
            f"{name}={getattr(given, name)!r}"
            for name in ("fragments", "overlap", "codec")
            if getattr(given, name) != getattr(usual, name)
        ]
        flat = ['nodes="flat"'] if cluster.has_hierarchy and not method.hierarchical else []
        return f"thinwire.DiLoCo(model.named_parameters(), torch.optim.AdamW, {', '.join(options + flat)})"
    assert method.entry is not None
    options = ["lr=lr"]
    if method.stage:
        options.append(f"stage={method.stage}")
    if method.entry.freeze_option is not None and (steps_given or method.entry.local_steps):
        options.append(f"{method.entry.freeze_option}={schedule.freeze_step}")
    if method.entry.freeze_option is not None and not method.stage and schedule.warmup_wire != "fp32":
        options.append(f'warmup_wire="{schedule.warmup_wire}"')
    if cluster.has_hierarchy and not method.stage and not method.hierarchical:
        options.append('nodes="flat"')
    return f"thinwire.{method.entry.name}(model.parameters(), {', '.join(options)})"


# Sizes of buckets: what each costs by itself, latency above all, against what the last one leaves with nothing to hide
# behind

_MEBIBYTE = 1 << 20
_TRIED = tuple(_MEBIBYTE << power for power in range(9))
WORTH_SAYING = 0.03
"""The part of a step that other buckets have to save."""


@dataclass(frozen=True)
class BucketAdvice:
    """`bucket_bytes` to give the optimizer, and the average step, in seconds, with it."""

    bucket_bytes: int
    step_seconds: float


def better_buckets(plan: Plan) -> BucketAdvice | None:
    """The buckets with which the recommended optimizer's steps are shortest; None where its own are as good, or given.

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
    if shortest > (1 - WORTH_SAYING) * best.step_seconds:
        return None
    size = next(size for size, seconds in tried.items() if seconds <= 1.01 * shortest)
    return BucketAdvice(size, tried[size])


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


_PLAIN = Method("ddp-fp32")
_USUAL = Method("onebit-adam")
_MOST_FASTER = 3


def as_answer(plan: Plan, assumed: Sequence[str] = (), *, steps_given: bool = False) -> str:
    """At most 12 lines. `assumed`: in words, what nobody gave or measured; `steps_given`: the run's length was."""
    best = plan.best
    if best is None:
        return "\n".join([_nothing_fits(plan), _subject(plan), *_assumptions(assumed)])
    lines = [_headline(plan, best)]
    warm = [name for name in best.phases if best.shares[name] < 1]
    if warm:
        parts = [f"{seconds_in_words(best.phases[name].step)} in {_share(best, name)}" for name in warm]
        lines.append(f"  a step   {', '.join(parts)}")
    lines += [
        f"  write    {code_for(best.method, plan.cluster, plan.schedule, steps_given=steps_given)}",
        f"  loss     {_loss(plan, best.method)}",
        f"  memory   {size_in_words(best.memory_bytes)} a rank{_activations(plan, best)}",
        f"  pays     {_where_it_pays(plan, best.method)}",
    ]
    if (buckets := better_buckets(plan)) is not None:
        given = f"bucket_bytes={buckets.bucket_bytes >> 20} << 20"
        lines.append(f"  buckets  with {given} {seconds_in_words(buckets.step_seconds)} a step, by this link's latency")
    if (outer := outer_in_words(plan, best)) is not None:
        lines.append(f"  outer    {outer}")
    if plan.faster():
        lines.append(f"Faster, not recommended: {_faster(plan)}")
    return "\n".join([*lines, _subject(plan), *_assumptions(assumed)])


def _loss(plan: Plan, method: Method) -> str:
    return loss_in_words(method, plan.workload.model.parameters, method.workers(plan.cluster))


def _headline(plan: Plan, best: Prediction) -> str:
    text = f"Take {title_of(best.method)}: {seconds_in_words(best.step_seconds)} a step"
    if len(best.phases) > 1:
        text += " over the run"
    if plan.cluster.ranks == 1:
        return f"{text}; one rank sends nothing"
    # A model in bf16 sends bf16 in both.
    others = [one for one in (BASELINE, _PLAIN) if one != best.method and (one == BASELINE or _in_fp32(plan))]
    times = [f"{_times(plan.of(one).step_seconds / best.step_seconds)} {title_of(one)}" for one in others]
    return ", ".join([text, *([" and ".join(times)] if times else [])])


def _in_fp32(plan: Plan) -> bool:
    return plan.workload.dtype == "fp32"


def _times(factor: float) -> str:
    return f"{factor:.1f}x as fast as" if factor >= 1.05 else "as fast as"


def _share(prediction: Prediction, name: str) -> str:
    return f"{name} steps ({100 * prediction.shares[name]:.3g}%)"


def _activations(plan: Plan, best: Prediction) -> str:
    return "" if "activations" in best.memory else ", activations not counted"


def _where_it_pays(plan: Plan, best: Method) -> str:
    """The link rate at which one has to think again."""
    one_bit = best if best.sends_less else _USUAL
    rate = plan.break_even(one_bit, WORTH_IT)
    ahead = f"{WORTH_IT}x as fast as {title_of(BASELINE)}"
    who = "it" if best.sends_less else title_of(one_bit)
    if rate == 0:
        return f"at no link rate is {who} {ahead}"
    if math.isinf(rate):
        return f"at every link rate {who} is at least {ahead}"
    return f"on links below {rate_in_words(rate)} a node, where {who} is at least {ahead}"


def _faster(plan: Plan) -> str:
    found = plan.faster()
    shown = [
        f"{title_of(one.method)} {seconds_in_words(one.step_seconds)} ({_why_not(plan, one.method)})" for one in found
    ]
    more = len(shown) - _MOST_FASTER
    return "; ".join(shown[:_MOST_FASTER]) + (f"; {more} more" if more > 0 else "")


def _why_not(plan: Plan, method: Method) -> str:
    if method.algorithm == DILOCO:
        loss = local_updates_loss(plan.workload.model.parameters, method.workers(plan.cluster))
        worse = " or worse" if plan.workload.model.parameters < SMALLEST else ""
        return f"loss {loss:+.1%}{worse}, published"
    measured = loss_of(method)
    if measured is None:
        return "speed only"
    return f"loss {measured.difference:+.1%}, {measured.seeds} seed{'s' if measured.seeds > 1 else ''}"


def _subject(plan: Plan) -> str:
    workload, cluster = plan.workload, plan.cluster
    text = f"For {workload.model.name}, {_millions(workload.model.parameters)} parameters in {workload.dtype}, on "
    text += f"{_plural(cluster.nodes, 'node')} of {_plural(cluster.ranks_per_node, 'rank')}"
    if cluster.nodes > 1:
        text += f" at {rate_in_words(cluster.between.speed.bytes_per_second)} a node"
    if cluster.ranks_a_core > 1:
        text += f", {cluster.ranks_a_core:.3g} ranks a core"
    computed = f"forward {seconds_in_words(workload.forward_seconds)}, backward"
    return f"{text}; {computed} {seconds_in_words(workload.backward_seconds)}"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def _millions(parameters: int) -> str:
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"


def _assumptions(assumed: Sequence[str]) -> list[str]:
    return [f"Assumed: {'; '.join(assumed)}"] if assumed else []


def _nothing_fits(plan: Plan) -> str:
    assert plan.memory_limit is not None or not plan.speed_only
    fitting = [one for one in plan.predictions if plan.fits(one)]
    if fitting:
        fastest = min(fitting, key=lambda one: one.step_seconds)
        return (
            f"None of these is known to keep the loss; the fastest is {title_of(fastest.method)}, "
            f"{seconds_in_words(fastest.step_seconds)} a step ({_why_not(plan, fastest.method)}): --speed-only takes it"
        )
    least = min(plan.predictions, key=lambda one: one.memory_bytes)
    return (
        f"Nothing fits into {size_in_words(plan.memory_limit or 0)} a rank: {title_of(least.method)} needs least, "
        f"{size_in_words(least.memory_bytes)}"
    )
