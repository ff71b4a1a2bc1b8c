"""The race to a loss: when each contender reaches it, as a table, a sentence and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from experiments.common.machine import in_words
from experiments.ethernet.race.contenders import BASELINE, CONTENDERS, FAIR_BASELINE, POWER_SGD
from experiments.ethernet.race.step_plots import rate_name
from experiments.training import plotting
from experiments.training.reporting import human_bytes

__all__ = ["Goal", "arrivals", "draw", "goal_of", "print_table", "seconds_to", "sentence", "timed_last"]

_TOLERANCE = 1.01
"""Losses within 1% are the same."""


class Goal(NamedTuple):
    """What everybody races to: `loss`, the fp32 baseline's final one and 1% that counts as the same, and the `steps`
    that the baseline took, which are everybody's unless they say otherwise."""

    loss: float
    steps: int


def timed_last(content: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded race with the seconds, and of the machine, that its steps were timed on last, at its own rate."""
    entry = content.get("retimed", {}).get(str(content["megabits"]))
    if entry is None:
        return dict(content)
    runs = {name: {**content["runs"][name], **one} for name, one in entry["runs"].items()}
    return {**content, "machine": entry["machine"], "tcp": entry["tcp"], "runs": runs}


def goal_of(runs: Mapping[str, Mapping[str, Any]]) -> Goal:
    """The goal of a race in which the baseline runs."""
    return Goal(_TOLERANCE * float(runs[BASELINE]["losses"][-1]), runs[BASELINE]["steps"][-1])


def seconds_to(loss: float, seconds: Sequence[float], losses: Sequence[float]) -> float | None:
    """When a curve first reaches `loss`, straight between its points; None if it never does."""
    before: tuple[float, float] | None = None
    for now, value in zip(seconds, losses, strict=True):
        if value <= loss:
            if before is None:
                return now
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (now - before[0])
        before = now, value
    return None


def arrivals(runs: Mapping[str, Mapping[str, Any]], goal: Goal) -> dict[str, float | None]:
    """Seconds to the loss, by contender."""
    return {name: seconds_to(goal.loss, run["seconds"], run["losses"]) for name, run in runs.items()}


def sentence(runs: Mapping[str, Mapping[str, Any]], goal: Goal) -> str:
    """How much sooner the first of ours arrives than DDP in bf16 and PowerSGD, and who does not arrive."""
    reached = arrivals(runs, goal)
    ours = {name: when for name, when in reached.items() if CONTENDERS[name].ours and when is not None}
    fair = reached[FAIR_BASELINE]
    if not ours or fair is None:
        return "None of ours reached the loss of DDP in fp32" if not ours else "DDP in bf16 did not reach fp32's loss"
    best = min(ours, key=lambda name: ours[name])
    text = f"{_label(best, runs[best], goal)} reaches the same loss {fair / ours[best]:.1f}x as soon as DDP in bf16"
    rivals = {name: when for name, when in reached.items() if name in POWER_SGD and when is not None}
    if rivals:
        rival = min(rivals, key=lambda name: rivals[name])
        text += f", {rivals[rival] / ours[best]:.1f}x as {CONTENDERS[rival].label}"
    local = tuple(name for name in reached if CONTENDERS[name].bursts)
    missing = [family for family, names in (("PowerSGD", POWER_SGD), ("DiLoCo", local)) if _none_of(names, reached)]
    return f"{text}; not in as many steps: {' and '.join(missing)}" if missing else text


def _label(name: str, run: Mapping[str, Any], goal: Goal) -> str:
    """A contender, and its steps where the others took another number."""
    steps = run["steps"][-1]
    return CONTENDERS[name].label + ("" if steps == goal.steps else f", {steps} steps in all")


def _none_of(names: Sequence[str], reached: Mapping[str, float | None]) -> bool:
    """Whether some of `names` raced, and none of them arrived."""
    arrived = [reached[name] for name in names if name in reached]
    return bool(arrived) and all(when is None for when in arrived)


def print_table(runs: Mapping[str, Mapping[str, Any]], goal: Goal) -> None:
    """Final losses, seconds to the goal, seconds a step by stage, bytes."""
    reached = arrivals(runs, goal)
    labels = {name: _label(name, run, goal) for name, run in runs.items()}
    width = max(28, *map(len, labels.values()))
    title = f"to a loss of {goal.loss:.3f}:"
    print(f"\n{title:{width}} {'seconds':>9} {'final':>7} {'sent':>9}  seconds a step")
    for name, run in runs.items():
        when = reached[name]
        shown = "never" if when is None else f"{when:.0f}"
        stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in run["seconds_a_step"].items())
        sent = human_bytes(run["bytes_sent"][-1])
        print(f"{labels[name]:{width}} {shown:>9} {run['losses'][-1]:7.3f} {sent:>9}  {stages}")


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds: validation loss over seconds."""
    content = timed_last(content)
    runs = content["runs"]
    figure = Figure(figsize=(11, 6))
    panel = figure.subplots()
    goal = goal_of(runs)
    top = plotting.write_head(figure, sentence(runs, goal), f"{content['subject']}; {in_words(content['machine'])}")
    figure.subplots_adjust(left=0.08, right=0.97, top=top, bottom=0.11)
    plotting.draw_reference([panel], plotting.Reference(goal.loss, "DDP's final loss in fp32, and 1%", at="left"))
    for name, run in runs.items():
        one = CONTENDERS[name]
        label, width = _label(name, run, goal), 2.6 if one.ours else 1.6
        panel.plot(run["seconds"], run["losses"], color=one.colour, linewidth=width, label=label)
        when = seconds_to(goal.loss, run["seconds"], run["losses"])
        if when is not None:
            panel.plot([when], [goal.loss], "o", color=one.colour, markersize=7)
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    rate = "links without a limit" if content["megabits"] is None else f"{rate_name(content['megabits'])} links"
    panel.set_xlabel(f"seconds of training over {rate} (log scale)")
    panel.set_ylabel("validation loss (nats a masked token)")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=9, loc="upper right")
    plotting.save(figure, path)
