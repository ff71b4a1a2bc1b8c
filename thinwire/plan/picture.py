"""Step time against link rate, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from thinwire.plan.answer import title
from thinwire.plan.methods import POWERSGD, Method
from thinwire.plan.prediction import predict
from thinwire.plan.recommendation import BASELINE, WORTH_IT, Plan, at_rate
from thinwire.plan.units import PlanError, rate_in_words, size_in_words

__all__ = ["draw_plan", "finding"]

_AROUND = 100.0  # the picture goes from a hundredth of the link's rate to a hundred times it
_POINTS = 60
_ALIKE = 0.02
_COLOURS = ("#d1495b", "#edae49", "#00798c", "#7a9e3f", "#5a3e85", "#30638e", "#3d348b")


def finding(plan: Plan) -> str:
    """What the picture shows, in a sentence."""
    where = f"{plan.workload.model.name} on {plan.cluster.nodes} nodes"
    best = plan.best
    if best is None:
        return f"{where}: nothing fits into {size_in_words(plan.memory_limit or 0)} a rank"
    rate = rate_in_words(_own_rate(plan))
    if best.method == BASELINE:
        return f"{where}: at {rate} {title(BASELINE)} is as fast as anything that keeps the loss"
    times = plan.of(BASELINE).step_seconds / best.step_seconds
    text = f"{where}: at {rate} {title(best.method)} is {times:.1f}x as fast as DDP in bf16"
    even = plan.break_even(best.method, WORTH_IT)
    return f"{text}, and worth it below {rate_in_words(even)}" if 0 < even < math.inf else text


def draw_plan(plan: Plan, path: Path) -> None:
    """Write the picture. Raises PlanError without matplotlib, or where the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    own = _own_rate(plan)
    rates = [own * _AROUND ** (2 * point / (_POINTS - 1) - 1) for point in range(_POINTS)]
    gigabits = [8 * rate / 1e9 for rate in rates]
    for number, (methods, seconds) in enumerate(_curves(plan, rates)):
        label = ", ".join(map(title, methods))
        if BASELINE in methods:
            axes.plot(gigabits, seconds, color="#222222", linewidth=3, label=f"{label} (baseline)")
        else:
            speed_only = all(one.algorithm == POWERSGD for one in methods)
            label, style = (f"{label} (speed only)", ":") if speed_only else (label, "-")
            colour = _COLOURS[number % len(_COLOURS)]
            axes.plot(gigabits, seconds, color=colour, linewidth=2, linestyle=style, label=label)
    axes.axvline(8 * own / 1e9, color="#999999", linewidth=1, linestyle="--", label=f"your link, {rate_in_words(own)}")
    axes.set(xscale="log", yscale="log", xlabel="link of a node (Gb/s)", ylabel="seconds a step, mean of the run (s)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(True, which="both", color="#eeeeee")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    where, _, what = finding(plan).partition(": ")
    figure.suptitle(f"{where}\n{what}")
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise PlanError(f"the picture {path} cannot be written: {error}") from error


def _curves(plan: Plan, rates: Sequence[float]) -> list[tuple[list[Method], list[float]]]:
    """Seconds at every rate, of the baseline first; methods that look alike are one curve."""
    found: list[tuple[list[Method], list[float]]] = []
    fastest: dict[str, Method] = {}  # of every algorithm the form that fits
    for prediction in sorted(plan.predictions, key=lambda one: one.step_seconds):
        if plan.fits(prediction):
            fastest.setdefault(prediction.method.algorithm, prediction.method)
    others = sorted((one for one in fastest.values() if one != BASELINE), key=lambda one: one.name)
    for method in (BASELINE, *others):
        seconds = [
            predict(plan.workload, at_rate(plan.cluster, rate), method, plan.schedule).step_seconds for rate in rates
        ]
        for methods, known in found:
            if all(abs(one / other - 1) < _ALIKE for one, other in zip(seconds, known, strict=True)):
                methods.append(method)
                break
        else:
            found.append(([method], seconds))
    return found


def _own_rate(plan: Plan) -> float:
    cluster = plan.cluster
    return (cluster.inside if cluster.nodes == 1 else cluster.between).speed.bytes_per_second
