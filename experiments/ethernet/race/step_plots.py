"""The step race's picture: where the time of a step goes, and who is ahead at which link rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from experiments.ethernet.race.contenders import CONTENDERS, FAIR_BASELINE
from experiments.ethernet.race.step_report import most_waiting
from experiments.training import plotting
from experiments.training.plotting import QUIET

__all__ = ["draw", "rate_name"]

_SHARES = {
    "compute": ("computing", "#c9ced4"),
    "encode": ("encoding and transport", QUIET),
    "wire": ("waiting while the link is busy", "#d1495b"),
    "wait": ("waiting otherwise", "#f0b7bf"),
}


def rate_name(megabits: float) -> str:
    """For example "50 Mb/s", "2.5 Gb/s"."""
    return f"{megabits:g} Mb/s" if megabits < 1000 else f"{megabits / 1000:g} Gb/s"


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds."""
    figure = Figure(figsize=(15, 6.2))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    figure.subplots_adjust(left=0.145, right=0.865, top=0.76, bottom=0.2, wspace=0.16)
    for line, finding in enumerate(content["findings"]):
        figure.text(0.02, 0.935 - 0.052 * line, finding, fontsize=14, fontweight="bold")
    made_on = content["machine"]
    figure.text(
        0.02,
        0.025,
        f"{content['subject']}; made on {made_on['cpu']}, {made_on['cores']} cores",
        fontsize=9,
        color=QUIET,
    )
    entries = content["rates"]
    _draw_breakdown(left, most_waiting(entries, content["waiting"]))
    _draw_speedups(right, [entry for entry in entries if entry["megabits"] is not None])
    plotting.save(figure, path)


def _draw_breakdown(panel: Axes, entry: Mapping[str, Any]) -> None:
    records = entry["contenders"]
    offsets = dict.fromkeys(records, 0.0)
    for share, (label, colour) in _SHARES.items():
        widths = [1e3 * record[share] for record in records.values()]
        panel.barh(range(len(records)), widths, left=list(offsets.values()), color=colour, label=label, height=0.62)
        offsets = {name: offsets[name] + width for name, width in zip(records, widths, strict=True)}
    for place, (name, record) in enumerate(records.items()):
        text = f"{offsets[name]:,.0f} ms   {record['speedup_over_fp32']:.1f}x"
        panel.annotate(text, (offsets[name], place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
    panel.set_yticks(range(len(records)), [CONTENDERS[name].label for name in records])
    panel.invert_yaxis()
    panel.set_xlim(0, 1.3 * max(offsets.values()))
    panel.set_xlabel("milliseconds a step")
    rate = "without shaped links" if entry["megabits"] is None else f"at {rate_name(entry['megabits'])}"
    panel.set_title(f"A step {rate}", loc="left", fontsize=11)
    panel.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.35, -0.12), ncols=2)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_speedups(panel: Axes, entries: Sequence[Mapping[str, Any]]) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_title(f"Speed over {CONTENDERS[FAIR_BASELINE].label}", loc="left", fontsize=11)
    if not entries:
        panel.text(0.5, 0.5, "links were not shaped", ha="center", transform=panel.transAxes, color=QUIET)
        return
    rates = [entry["megabits"] for entry in entries]
    # A rate next to another keeps its points and gives up its label.
    labelled = [rate for rate, last in zip(rates, [0, *rates], strict=False) if rate > 1.3 * last]
    ends = {}
    for name in entries[0]["contenders"]:
        one = CONTENDERS[name]
        values = [entry["contenders"][name]["speedup_over_bf16"] for entry in entries]
        panel.plot(rates, values, color=one.colour, marker="o", markersize=4, linewidth=2.6 if one.ours else 1.5)
        ends[name] = values[0]
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.xaxis.set_major_locator(FixedLocator(labelled))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: rate_name(value)))
    panel.tick_params(axis="x", labelrotation=45, labelsize=8)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    panel.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    panel.grid(alpha=0.25, which="both")
    # Slow links, where the contenders are apart, lie at the right, beside their names.
    panel.invert_xaxis()
    low, high = panel.get_ylim()
    for name, height in _spread(ends, low, high).items():
        place = (1.01, height)
        panel.annotate(
            CONTENDERS[name].label,
            place,
            xycoords="axes fraction",
            va="center",
            fontsize=9,
            color=CONTENDERS[name].colour,
        )


def _spread(values: Mapping[str, float], low: float, high: float) -> dict[str, float]:
    """Heights for labels, as fractions of a logarithmic axis, near their values and apart from one another."""
    heights = {name: log(value / low) / log(high / low) for name, value in values.items()}
    placed: dict[str, float] = {}
    lowest = 0.0
    for name in sorted(heights, key=lambda name: heights[name]):
        placed[name] = max(heights[name], lowest)
        lowest = placed[name] + 0.05
    return placed
