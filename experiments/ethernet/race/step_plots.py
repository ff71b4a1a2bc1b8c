"""The step race's picture: where the time of a step goes, who is ahead at which link rate, beside DDP in bf16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from experiments.common.machine import in_words
from experiments.ethernet.race.contenders import CONTENDERS
from experiments.ethernet.race.step_report import most_waiting, winning_rates
from experiments.training import plotting
from experiments.training.plotting import QUIET
from experiments.training.reporting import human_factor

__all__ = ["draw", "rate_name"]

_SHARES = {
    "compute": ("computing", "#c9ced4"),
    "encode": ("encoding and transport", "#8a939e"),
    "wire": ("waiting for a busy link", "#d1495b"),
    "wait": ("waiting otherwise", "#f0b7bf"),
}


def rate_name(megabits: float) -> str:
    """In three digits at most, for example "50 Mb/s", "1.66 Gb/s"."""
    return f"{megabits:.3g} Mb/s" if megabits < 1000 else f"{megabits / 1000:.3g} Gb/s"


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds."""
    entries = content["rates"]
    shown = most_waiting(entries, content["waiting"])
    figure = Figure(figsize=(11.5, 5.6))
    title, where = _title(entries, shown)
    top = plotting.write_head(figure, title, f"{where}{content['subject']}; {in_words(content['machine'])}")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.05))
    figure.subplots_adjust(left=0.195, right=0.98, top=top - 0.06, bottom=0.21, wspace=0.23)
    _draw_breakdown(left, shown)
    _draw_speedups(right, [entry for entry in entries if entry["megabits"] is not None])
    plotting.save(figure, path)


def _title(entries: Sequence[Mapping[str, Any]], shown: Mapping[str, Any]) -> tuple[str, str]:
    """The title, about the fastest of ours where the picture shows a step, and up to which link rate that one wins."""
    records = {name: record for name, record in shown["contenders"].items() if CONTENDERS[name].ours}
    place = "without shaped links" if shown["megabits"] is None else f"at {rate_name(shown['megabits'])}"
    if not records:
        return f"Where the time of a step goes {place}", ""
    best = max(records, key=lambda name: float(records[name]["speedup_over_bf16"]))
    factor = records[best]["speedup_over_bf16"]
    place = f"{place[0].upper()}{place[1:]}"
    title = f"{place} {CONTENDERS[best].label}'s steps are {human_factor(factor)} as fast as DDP's in bf16"
    rate = winning_rates(entries).get(best)
    if rate is None or rate != rate:
        return title, ""
    limit = f"on links slower than {rate_name(float(f'{rate:.2g}'))}" if isfinite(rate) else "at every rate measured"
    stage = "" if CONTENDERS[best].phase == "warmup" else ", warmup not counted"
    return title, f"Faster {limit}{stage}. "


def _draw_breakdown(panel: Axes, entry: Mapping[str, Any]) -> None:
    records = entry["contenders"]
    offsets = dict.fromkeys(records, 0.0)
    for share, (label, colour) in _SHARES.items():
        widths = [1e3 * record[share] for record in records.values()]
        panel.barh(range(len(records)), widths, left=list(offsets.values()), color=colour, label=label, height=0.62)
        offsets = {name: offsets[name] + width for name, width in zip(records, widths, strict=True)}
    for place, (name, record) in enumerate(records.items()):
        text = f"{offsets[name]:,.0f} ms, {human_factor(record['speedup_over_bf16'])}"
        panel.annotate(text, (offsets[name], place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
    panel.set_yticks(range(len(records)), [CONTENDERS[name].label for name in records])
    for label, name in zip(panel.get_yticklabels(), records, strict=True):
        label.set(color=CONTENDERS[name].colour, fontweight="bold" if CONTENDERS[name].ours else "normal")
    panel.invert_yaxis()
    panel.set_xlim(0, 1.4 * max(offsets.values()))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    rate = "without shaped links" if entry["megabits"] is None else f"at {rate_name(entry['megabits'])}"
    panel.set_xlabel(f"milliseconds a step {rate}, and speed over DDP in bf16")
    panel.set_title("Where the time of a step goes", loc="left", fontsize=11)
    panel.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.35, -0.14), ncols=2)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_speedups(panel: Axes, entries: Sequence[Mapping[str, Any]]) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_title("Who is ahead on which link", loc="left", fontsize=11)
    if not entries:
        panel.text(0.5, 0.5, "links were not shaped", ha="center", transform=panel.transAxes, color=QUIET)
        return
    rates = [entry["megabits"] for entry in entries]
    # From the fastest on the slowest link down, as the lines lie there.
    slowest = entries[0]["contenders"]
    for name in sorted(slowest, key=lambda name: -float(slowest[name]["speedup_over_bf16"])):
        one = CONTENDERS[name]
        values = [entry["contenders"][name]["speedup_over_bf16"] for entry in entries]
        style = {"color": one.colour, "linewidth": 2.6 if one.ours else 1.5, "label": one.label}
        panel.plot(rates, values, marker="o", markersize=4, **style)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.xaxis.set_major_locator(FixedLocator(_apart(rates)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("link rate in Mb/s, from slow to fast (log scale)")
    panel.set_ylabel("speed over DDP in bf16 (log scale)")
    panel.grid(alpha=0.25)
    # Lines fall to the right, where links are fast and all are alike: the corner above is free.
    panel.legend(frameon=False, fontsize=9, loc="upper right")


def _apart(rates: Sequence[float]) -> list[float]:
    """Those with room for a label: one next to another keeps its points and gives up its label."""
    labelled: list[float] = []
    for rate in rates:
        if not labelled or rate > 1.6 * labelled[-1]:
            labelled.append(rate)
    return labelled
