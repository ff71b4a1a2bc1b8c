"""A plan as people and programs read it: the short answer with the line to write, a table, JSON; and meshes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from thinwire.plan.cluster import Cluster
from thinwire.plan.meshes import MeshJob, MeshPrediction
from thinwire.plan.methods import DILOCO, ONEBIT_MUON, POWERSGD, SHARDED_ADAM, Method, OuterSchedule, Schedule
from thinwire.plan.prediction import Prediction, StepPrediction
from thinwire.plan.recommendation import (
    BASELINE,
    LOSSES,
    SMALLEST,
    SOURCE,
    WORTH_IT,
    Failures,
    Plan,
    better_buckets,
    local_updates_loss,
    loss_in_words,
)
from thinwire.plan.units import count_in_words, rate_in_words, seconds_in_words, size_in_words

_DDP = "model = DistributedDataParallel(model)"
_NAMES_OF_REPLICAS = {"ddp-fp32": "DDP", SHARDED_ADAM: "AdamW"}


def title(method: Method) -> str:
    """What a sentence calls it."""
    if method.algorithm == POWERSGD:
        return f"PowerSGD of rank {method.rank}"
    named = {
        "ddp-fp32": "DDP in fp32",
        "ddp-bf16": "DDP with its bf16 hook",
        SHARDED_ADAM: "AdamW on shards",
        DILOCO: "DiLoCo",
    }
    words = method.entry.name if method.entry is not None else named[method.algorithm]
    if method.stage:
        words += f" at ZeRO stage {method.stage}"
    if method.hierarchical:
        words += ", by node"
    if method.has_codecs:
        words += f", weights in {method.weights}, gradients in {method.gradients}"
    return words if method.offload is None else f"{words}, offloaded to {method.offload}"


def _code_for(method: Method, cluster: Cluster, schedule: Schedule, *, steps_given: bool = False) -> str:
    """The line. `steps_given`: the schedule's steps are the run's own, so that the step of the freeze is known."""
    if method.algorithm == "ddp-fp32":
        return _DDP
    if method.algorithm == "ddp-bf16":
        return f"{_DDP}; model.register_comm_hook(None, default_hooks.bf16_compress_hook)"
    if method.algorithm == POWERSGD:
        state = f"PowerSGDState(None, {method.rank}, start_powerSGD_iter={schedule.powersgd_start})"
        return f"{_DDP}; model.register_comm_hook(powerSGD_hook.{state}, powerSGD_hook.powerSGD_hook)"
    if method.algorithm == SHARDED_ADAM:
        return _code_for_shards(method, cluster)
    if method.algorithm == DILOCO:
        given, usual = schedule.outer, OuterSchedule()
        options = ["lr=lr", f"every={given.every}"]
        options += [
            f"{name}={getattr(given, name)!r}"
            for name in ("fragments", "overlap", "codec")
            if getattr(given, name) != getattr(usual, name)
        ]
        flat = ['nodes="flat"'] if cluster.has_hierarchy and not method.hierarchical else []
        inner = f"{'thinwire' if given.inner == 'Muon' else 'torch'}.optim.{given.inner}"
        return f"thinwire.DiLoCo(model.named_parameters(), {inner}, {', '.join(options + flat)})"
    assert method.entry is not None
    options = ["lr=lr"]
    if method.stage:
        options.append(f"stage={method.stage}")
    if method.entry.freeze_option is not None and (steps_given or method.entry.local_steps):
        options.append(f"{method.entry.freeze_option}={schedule.freeze_step}")
    if method.entry.freeze_option is not None and schedule.warmup_wire != "fp32":
        options.append(f'warmup_wire="{schedule.warmup_wire}"')
    if method.algorithm == ONEBIT_MUON:
        options.append(f'codec="{schedule.muon_codec}"')
        return f"thinwire.{method.entry.name}(model.named_parameters(), {', '.join(options)})"
    if cluster.has_hierarchy and not method.hierarchical:
        options.append('nodes="flat"')
    return f"thinwire.{method.entry.name}(model.parameters(), {', '.join(options)})"


def _code_for_shards(method: Method, cluster: Cluster) -> str:
    if method.stage < 3:
        offload = {None: "", "memory": ", offload=True", "disk": ", offload=path"}[method.offload]
        return f"thinwire.ShardedOptimizer(model.parameters(), torch.optim.AdamW, stage={method.stage}, lr=lr{offload})"
    options = ['"stage": 3']
    options += [f'"{name}_codec": "{codec}"' for name in ("weights", "gradients") if (codec := getattr(method, name))]
    if method.hierarchical:
        options.append(f'"node_size": {cluster.ranks_per_node}')
    if method.offload is not None:
        place = {"memory": '"cpu"', "disk": '"nvme", "nvme_path": path'}[method.offload]
        options.append(f'"offload_optimizer": {{"device": {place}}}')
        if cluster.host is not None and cluster.host.memory:
            options.append('"offload_param": {"device": "cpu"}')
    return f'thinwire.initialize(model=model, config={{..., "zero_optimization": {{{", ".join(options)}}}}})'


_ROUNDING = 1e-9
_HEADINGS = ("step ms", "compute", "encode", "wire", "exposed", "MB sent", "MB node", "GB held")


def as_table(plan: Plan) -> str:
    """Of all methods, the phases of each that has several, and the break-even rates."""
    workload, cluster = plan.workload, plan.cluster
    rows: list[tuple[str, StepPrediction, str]] = []
    for prediction in plan.predictions:
        held = f"{prediction.memory_bytes / 1e9:.2f}" + ("" if plan.fits(prediction) else "!")
        rows.append((prediction.method.name, prediction.average, held))
        if len(prediction.phases) > 1:
            rows += [
                (f"  {name}, {100 * prediction.shares[name]:.3g}% of steps", step, "")
                for name, step in prediction.phases.items()
            ]
    width = max(len(label) for label, _, _ in rows) + 2
    lines = [
        f"{workload.model.name}, {workload.model.parameters:,} parameters in {workload.dtype}, "
        f"on {cluster.nodes} nodes of {cluster.ranks_per_node}",
        "",
        f"{'method':<{width}}" + "".join(f"{heading:>10}" for heading in _HEADINGS),
    ]
    lines += [f"{label:<{width}}{_cells(step, held)}" for label, step, held in rows]
    lines += [
        "",
        "Times in ms of one step, averaged over the run; below, its phases. Exposed: the part of the wire that nothing",
        "hides. MB sent by a rank, and by a node to others. GB held by a rank; ! is more than there is.",
        "",
        *(_break_even(one.method, plan) for one in plan.predictions if one.method.sends_less),
        *(f"{one.method.name}: {text}" for one in plan.predictions if (text := _outer(plan, one)) is not None),
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
        "better_buckets": buckets and dict(zip(("bucket_bytes", "step_seconds"), buckets, strict=True)),
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
        "offloaded": dict(prediction.offloaded),
        "fits": plan.fits(prediction),
    }
    measured = LOSSES.get(prediction.method.algorithm)
    described["measured_loss"] = None if measured is None else asdict(measured)
    if prediction.method.algorithm == DILOCO:
        workers = prediction.method.workers(plan.cluster)
        loss = local_updates_loss(plan.workload.model.parameters, workers)
        described["published_loss"] = {"difference": loss, "beside": "data parallel", "source": SOURCE}
    if prediction.method.sends_less:
        rate = plan.break_even(prediction.method)
        described["break_even_bytes_per_second"] = None if math.isinf(rate) else rate
    return described


def _outer(plan: Plan, prediction: Prediction) -> str | None:
    """Whether a fragment's way hides behind the steps that it is in flight; None where there are no outer steps."""
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


def _cells(step: StepPrediction, held: str) -> str:
    milliseconds = [1e3 * value for value in (step.step, step.compute, step.encode, step.wire, step.exposed)]
    numbers = [*milliseconds, step.bytes_sent / 1e6, step.bytes_between / 1e6]
    short = (f"{one:.{0 if one >= 1000 else 1 if one >= 10 else 2}f}" for one in numbers)
    return "".join(f"{cell:>10}" for cell in (*short, held))


def _break_even(method: Method, plan: Plan) -> str:
    rate = plan.break_even(method)
    if math.isinf(rate):
        return f"{method.name} beats {BASELINE.name} at every link rate"
    if rate == 0:
        return f"{method.name} beats {BASELINE.name} at no link rate"
    return f"{method.name} beats {BASELINE.name} below {rate_in_words(rate)} a node"


_MOST_FASTER = 3


def as_answer(
    plan: Plan, assumed: Sequence[str] = (), *, steps_given: bool = False, failures: Failures | None = None
) -> str:
    """At most 13 lines. `assumed`: what was neither given nor measured; `steps_given`: the run's length was."""
    best = plan.best
    context = [_subject(plan), *([f"Assumed: {'; '.join(assumed)}"] if assumed else [])]
    if best is None:
        return "\n".join([_nothing_fits(plan), *context])
    lines = [_headline(plan, best)]
    parts = [
        f"{seconds_in_words(step.step)} in {name} steps ({100 * best.shares[name]:.3g}%)"
        for name, step in best.phases.items()
        if best.shares[name] < 1
    ]
    if parts:
        lines.append(f"  a step   {', '.join(parts)}")
    counted = "" if "activations" in best.memory else ", activations not counted"
    loss = loss_in_words(best.method, plan.workload.model.parameters, best.method.workers(plan.cluster))
    lines += [
        f"  write    {_code_for(best.method, plan.cluster, plan.schedule, steps_given=steps_given)}",
        f"  loss     {loss}",
        f"  memory   {size_in_words(best.memory_bytes)} a rank{counted}"
        + "".join(f"; of a node's {place} {size_in_words(held)}" for place, held in best.offloaded.items() if held),
        f"  pays     {_where_it_pays(plan, best.method)}",
    ]
    if (buckets := better_buckets(plan)) is not None:
        size, seconds = buckets
        a_step = f"{seconds_in_words(seconds)} a step, by this link's latency"
        lines.append(f"  buckets  with bucket_bytes={size >> 20} << 20 {a_step}")
    if (outer := _outer(plan, best)) is not None:
        lines.append(f"  outer    {outer}")
    if failures is not None:
        lines.append(f"  deaths   {failures.in_words()}")
    faster = [
        f"{title(one.method)} {seconds_in_words(one.step_seconds)} ({_why_not(plan, one.method)})"
        for one in plan.faster()
    ]
    if faster:
        more = [f"{len(faster) - _MOST_FASTER} more"] if len(faster) > _MOST_FASTER else []
        lines.append(f"Faster, not recommended: {'; '.join(faster[:_MOST_FASTER] + more)}")
    return "\n".join([*lines, *context])


def _headline(plan: Plan, best: Prediction) -> str:
    text = f"Take {title(best.method)}: {seconds_in_words(best.step_seconds)} a step"
    if len(best.phases) > 1:
        text += " over the run"
    if plan.cluster.ranks == 1:
        return f"{text}; one rank sends nothing"
    # A model in bf16 sends bf16 in both.
    others = [BASELINE, Method("ddp-fp32")] if plan.workload.dtype == "fp32" else [BASELINE]
    comparisons = []
    for other in others:
        if other != best.method:
            factor = plan.of(other).step_seconds / best.step_seconds
            comparisons.append(f"{f'{factor:.1f}x ' if factor >= 1.05 else ''}as fast as {title(other)}")
    return f"{text}, {' and '.join(comparisons)}" if comparisons else text


def _where_it_pays(plan: Plan, best: Method) -> str:
    """The link rate at which one has to think again."""
    one_bit = best if best.sends_less else Method("onebit-adam")
    rate = plan.break_even(one_bit, WORTH_IT)
    ahead = f"{WORTH_IT}x as fast as {title(BASELINE)}"
    who = "it" if best.sends_less else title(one_bit)
    if rate == 0:
        return f"at no link rate is {who} {ahead}"
    if math.isinf(rate):
        return f"at every link rate {who} is at least {ahead}"
    return f"on links below {rate_in_words(rate)} a node, where {who} is at least {ahead}"


def _why_not(plan: Plan, method: Method) -> str:
    if method.algorithm == DILOCO:
        loss = local_updates_loss(plan.workload.model.parameters, method.workers(plan.cluster))
        worse = " or worse" if plan.workload.model.parameters < SMALLEST else ""
        return f"loss {loss:+.1%}{worse}, published"
    measured = LOSSES.get(method.algorithm)
    if measured is None:
        return "speed only"
    return f"loss {measured.difference:+.1%}, {measured.seeds} seed{'s' if measured.seeds > 1 else ''}"


def _subject(plan: Plan) -> str:
    workload, cluster = plan.workload, plan.cluster
    nodes, ranks = (
        f"{count} {what}{'s' if count > 1 else ''}"
        for count, what in ((cluster.nodes, "node"), (cluster.ranks_per_node, "rank"))
    )
    parameters = count_in_words(workload.model.parameters)
    text = f"For {workload.model.name}, {parameters} parameters in {workload.dtype}, on {nodes} of {ranks}"
    if cluster.nodes > 1:
        text += f" at {rate_in_words(cluster.between.speed.bytes_per_second)} a node"
    if cluster.ranks_a_core > 1:
        text += f", {cluster.ranks_a_core:.3g} ranks a core"
    computed = f"forward {seconds_in_words(workload.forward_seconds)}, backward"
    return f"{text}; {computed} {seconds_in_words(workload.backward_seconds)}"


def _nothing_fits(plan: Plan) -> str:
    assert plan.memory_limit is not None or not plan.speed_only
    fitting = [one for one in plan.predictions if plan.fits(one)]
    if fitting:
        fastest = min(fitting, key=lambda one: one.step_seconds)
        return (
            f"None of these is known to keep the loss; the fastest is {title(fastest.method)}, "
            f"{seconds_in_words(fastest.step_seconds)} a step ({_why_not(plan, fastest.method)}): --speed-only takes it"
        )
    least = min(plan.predictions, key=lambda one: one.memory_bytes)
    return (
        f"Nothing fits into {size_in_words(plan.memory_limit or 0)} a rank: {title(least.method)} needs least, "
        f"{size_in_words(least.memory_bytes)}"
    )


def mesh_answer(job: MeshJob, found: Sequence[MeshPrediction], assumed: Sequence[str]) -> str:
    """At most 12 lines: the first of `found`, and what the next ones take."""
    best, mesh, model, cluster = found[0], found[0].mesh, job.model, job.cluster
    share = {name: value / best.step_seconds for name, value in best.seconds.items()}
    several, wire = "" if best.micro_batches == 1 else "es", "bf16" if mesh.wire == "none" else mesh.wire
    lines = [
        f"Take {mesh}: {seconds_in_words(best.step_seconds)} a step, "
        f"{best.operations_a_second / 1e12:.3g} TFLOP/s a rank",
        f'  mesh     init_device_mesh("cuda", ({mesh.pp}, {mesh.dp}, {mesh.tp}), mesh_dim_names=("pp", "dp", "tp"))',
        f"  stages   {best.micro_batches} micro-batch{several} of {mesh.micro_batch}"
        + (f", {mesh.schedule}, bubble {best.bubble:.1%}, activations in {wire}" if mesh.pp > 1 else "")
        + (", layers recomputed in backward" if mesh.recompute else ""),
        f"  replicas {_replica_words(best)}",
        f"  time     {', '.join(f'{name} {value:.1%}' for name, value in share.items() if value > 5e-4)}",
        f"  memory   {size_in_words(best.memory_bytes)} a rank: "
        + ", ".join(f"{name} {size_in_words(value)}" for name, value in best.memory.items() if value),
    ]
    if found[1:]:
        others = (f"{one.mesh} {seconds_in_words(one.step_seconds)}" for one in found[1:4])
        lines.append(f"Next: {'; '.join(others)}")
    lines.append(
        f"For {model.name}, {count_in_words(model.parameters)} parameters in bf16, {job.batch} sequences of "
        f"{job.length} tokens a step, on {cluster.nodes} nodes of {cluster.ranks_per_node} at "
        f"{rate_in_words(cluster.between.speed.bytes_per_second)} a node"
    )
    return "\n".join([*lines, f"Assumed: {'; '.join(assumed)}"] if assumed else lines)


def mesh_json(job: MeshJob, found: Sequence[MeshPrediction]) -> dict[str, Any]:
    """The same in seconds and bytes, of every mesh."""
    meshes = [
        {
            **asdict(one.mesh),
            **{name: value for name, value in asdict(one).items() if name != "mesh"},
            **{name: getattr(one, name) for name in ("bubble", "step_seconds", "memory_bytes", "operations_a_second")},
        }
        for one in found
    ]
    return {
        "model": job.model.name,
        "parameters": job.model.parameters,
        "nodes": job.cluster.nodes,
        "ranks_per_node": job.cluster.ranks_per_node,
        "batch": job.batch,
        "meshes": meshes,
    }


def _replica_words(found: MeshPrediction) -> str:
    mesh = found.mesh
    if mesh.dp == 1:
        return "one"
    method, sent = mesh.method, size_in_words(found.bytes_sent)
    name = method.entry.name if method.entry else _NAMES_OF_REPLICAS[method.algorithm]
    stage = f" at ZeRO stage {method.stage}" if method.stage else ""
    by_node = ", by node" if method.hierarchical else ""
    return f'{name}{stage}{by_node}, mesh=mesh["dp"], averages in {"1 bit" if method.entry else "bf16"}, {sent} a rank'
