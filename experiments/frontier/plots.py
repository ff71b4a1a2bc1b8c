"""The picture of `experiments.frontier`: whole runs as dots, loss over bytes sent and over seconds by link."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.common.machine import in_words
from experiments.frontier.contenders import BASELINE, CONTENDERS
from experiments.frontier.findings import RATES, Standing, standings, title
from experiments.frontier.store import runs_of
from experiments.training import plotting
from experiments.training.reporting import human_bytes

__all__ = ["draw"]

_FARTHEST_PERCENT, _FARTHEST_DEVIATIONS = 12.0, 3.0
"""A loss above the baseline's by more than both, of its loss and of its seeds' scatter, is an arrow at the top."""


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds."""
    settings, runs = content["settings"], runs_of(content)
    counts = sorted({run.workers for run in runs})
    found = {count: standings(runs, count, settings["steps"]) for count in counts}
    found = {count: of for count, of in found.items() if BASELINE in of}
    rows = max(1, len(found))
    figure = Figure(figsize=(16, 4.0 * rows + 1.3))
    panels = figure.subplots(rows, 1 + len(RATES), sharey="row", squeeze=False)
    text = "" if settings["corpus"] is None else f" Text: {settings['corpus']}."
    subtitle = (
        f"{settings['description']}, {settings['steps']} steps; each dot is a whole run at the method's own best rate, "
        f"mean of its seeds, bars and band one standard deviation. Lower and farther left is better.{text} Seconds: "
        f"measured computing + bytes ÷ link rate, without latency or overlap; {in_words(content['machine'])}"
    )
    head = title(found[min(found)], min(found)) if found else "No run of the baseline yet"
    top = plotting.write_head(figure, head, subtitle)
    height = figure.get_size_inches()[1]
    figure.subplots_adjust(left=0.055, right=0.82, top=top - 0.3 / height, bottom=0.6 / height, hspace=0.34, wspace=0.1)
    for (count, of), row in zip(found.items(), panels, strict=False):
        _draw_row(row, of, count, settings["unit"])
    _legend(figure, [name for name in CONTENDERS if any(name in of for of in found.values())], top)
    plotting.save(figure, path)


def _draw_row(row: Any, found: Mapping[str, Standing], workers: int, unit: str) -> None:
    bytes_panel, *link_panels = row
    _draw_panel(bytes_panel, found, {name: one.bytes_sent for name, one in found.items()})
    bytes_panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))
    bytes_panel.set_xlabel("sent by each worker in the run (log scale)")
    bytes_panel.set_ylabel(unit)
    bytes_panel.set_title(f"{workers} workers: loss by bytes", loc="left", fontsize=11)
    for panel, link in zip(link_panels, RATES, strict=True):
        _draw_panel(panel, found, {name: one.seconds[link] for name, one in found.items()})
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f} s"))
        panel.set_xlabel("seconds of the run (log scale)")
        panel.set_title(f"by time over {link}", loc="left", fontsize=11)
    loss = found[BASELINE].loss
    percent = row[-1].secondary_yaxis(
        "right", functions=(lambda value: 100 * (value / loss - 1), lambda value: loss * (1 + value / 100))
    )
    percent.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}%"))
    percent.spines["right"].set_visible(False)
    percent.tick_params(length=0, labelsize=9, colors=plotting.QUIET)


def _draw_panel(panel: Axes, found: Mapping[str, Standing], places: Mapping[str, float]) -> None:
    """One dot a contender at `places`, the baseline's band, and a line along those that nobody beats in both."""
    baseline = found[BASELINE]
    highest = baseline.loss + max(_FARTHEST_PERCENT / 100 * baseline.loss, _FARTHEST_DEVIATIONS * baseline.deviation)
    panel.axhspan(baseline.loss - baseline.deviation, baseline.loss + baseline.deviation, color="#5b6572", alpha=0.13)
    panel.axhline(baseline.loss, color=plotting.QUIET, linestyle=(0, (4, 3)), linewidth=1)
    inside = {name: one for name, one in found.items() if isfinite(one.loss) and one.loss <= highest}
    for name, one in inside.items():
        own = CONTENDERS[name]
        style = {"color": own.colour, "marker": own.marker, "markersize": 8, "capsize": 2, "elinewidth": 1}
        panel.errorbar([places[name]], [one.loss], yerr=[one.deviation], linestyle="none", **style)
    for name in found.keys() - inside.keys():
        own = CONTENDERS[name]
        panel.plot([places[name]], [0.97], own.marker, color=own.colour, transform=panel.get_xaxis_transform())
        panel.annotate(
            "",
            (places[name], 1.0),
            (places[name], 0.9),
            xycoords=panel.get_xaxis_transform(),
            arrowprops={"arrowstyle": "->", "color": own.colour},
        )
    best: list[str] = []
    for name in sorted(inside, key=lambda name: places[name]):
        if not best or inside[name].loss < inside[best[-1]].loss:
            best.append(name)
    panel.plot([places[n] for n in best], [inside[n].loss for n in best], color=plotting.QUIET, alpha=0.4, zorder=0)
    panel.set_xscale("log")
    low, high = min(places.values()), max(places.values())
    panel.set_xlim(low / 1.6, high * 1.6)
    panel.xaxis.set_major_locator(
        LogLocator(subs=(1,) if high > 50 * low else (1, 3) if high > 6 * low else (1, 2, 4, 7))
    )
    panel.xaxis.set_minor_formatter(NullFormatter())
    lows = [one.loss - one.deviation for one in inside.values()]
    highs = [one.loss + one.deviation for one in inside.values()]
    margin = 0.08 * max(float(np.max(highs) - np.min(lows)), 1e-3)
    panel.set_ylim(min(lows) - margin, max(highs) + margin)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25)


def _legend(figure: Figure, names: list[str], top: float) -> None:
    handles = [
        figure.axes[0].plot([], [], CONTENDERS[name].marker, color=CONTENDERS[name].colour, label=label)[0]
        for name in names
        for label in [f"{CONTENDERS[name].label}, the dashed line" if name == BASELINE else CONTENDERS[name].label]
    ]
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.843, top), frameon=False, fontsize=9)
