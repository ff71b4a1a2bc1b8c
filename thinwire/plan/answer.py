"""A plan as an answer of a few lines: what to take, how fast it is, what it costs, what to write, what was assumed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from thinwire.plan.advice import code_for, title_of
from thinwire.plan.buckets import better_buckets
from thinwire.plan.losses import loss_in_words, loss_of
from thinwire.plan.methods import DILOCO, Method
from thinwire.plan.prediction import Prediction
from thinwire.plan.published_losses import SMALLEST, local_updates_loss
from thinwire.plan.recommendation import BASELINE, WORTH_IT, Plan
from thinwire.plan.report import outer_in_words
from thinwire.plan.units import rate_in_words, seconds_in_words, size_in_words

__all__ = ["as_answer"]

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
