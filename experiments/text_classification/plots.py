"""The picture: accuracy by learning rate, accuracy of every seed at the best one, bytes of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.text_classification.findings import BASELINE, POINTS, Finding
from experiments.text_classification.learning import Outcome
from experiments.training import plotting
from experiments.training.optimizers import OPTIMIZERS
from experiments.training.plotting import QUIET
from experiments.training.reporting import human_bytes

__all__ = ["draw"]


def draw(
    swept: Mapping[str, Mapping[float, float]],
    runs: Mapping[str, Sequence[Outcome]],
    found: Mapping[str, Finding],
    title: str,
    subtitle: str,
    path: Path,
) -> None:
    """Draws and writes the picture; `swept` holds validation errors, percent, by rate."""
    figure = Figure(figsize=(15.5, 5.4))
    rates, seeds, traffic = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.05, right=0.985, top=0.77, bottom=0.12, wspace=0.2)
    figure.text(0.05, 0.93, title, fontsize=14.5, fontweight="bold")
    figure.text(0.05, 0.87, subtitle, fontsize=9.5, color=QUIET)
    _draw_rates(rates, swept, found)
    _draw_seeds(seeds, runs, found)
    _draw_traffic(traffic, found)
    for panel in (rates, seeds, traffic):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
        panel.set_axisbelow(True)
    plotting.save(figure, path)


def _draw_rates(panel: Axes, swept: Mapping[str, Mapping[float, float]], found: Mapping[str, Finding]) -> None:
    for name, errors in swept.items():
        one, best = OPTIMIZERS[name], found[name].learning_rate
        panel.plot(list(errors), [100 - error for error in errors.values()], "o-", color=one.colour, label=one.label)
        panel.plot([best], [100 - errors[best]], "o", color=one.colour, markersize=12, fillstyle="none")
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_title("learning rates, one seed; circles: the best", loc="left", fontsize=10.5)
    panel.set_xlabel("peak learning rate (log scale)")
    panel.set_ylabel("validation accuracy (%)")
    panel.legend(frameon=False)


def _draw_seeds(panel: Axes, runs: Mapping[str, Sequence[Outcome]], found: Mapping[str, Finding]) -> None:
    baseline = found[BASELINE].test
    panel.axhspan(baseline - POINTS, baseline + POINTS, color=QUIET, alpha=0.15, linewidth=0)
    panel.axhline(baseline, color=OPTIMIZERS[BASELINE].colour, linestyle="--", linewidth=1)
    for place, (name, outcomes) in enumerate(runs.items()):
        one = OPTIMIZERS[name]
        across = place + np.linspace(-0.12, 0.12, len(outcomes))
        panel.plot(across, [outcome.test for outcome in outcomes], "o", color=one.colour, markersize=8, alpha=0.8)
        panel.hlines(found[name].test, place - 0.28, place + 0.28, color=one.colour, linewidth=2.5)
        panel.annotate(
            f"{found[name].test:.2f}%",
            (place + 0.3, found[name].test),
            xytext=(0, 3),
            textcoords="offset points",
            ha="left",
            color=one.colour,
        )
    panel.set_xlim(-0.6, len(runs) - 0.2)
    panel.set_xticks(range(len(runs)), [OPTIMIZERS[name].label for name in runs])
    panel.set_title(f"seeds at the best rate, lines: means; grey: within {POINTS:g} points", loc="left", fontsize=10.5)
    panel.set_xlabel("optimizer")
    panel.set_ylabel("test accuracy (%)")


def _draw_traffic(panel: Axes, found: Mapping[str, Finding]) -> None:
    for place, (name, one) in enumerate(found.items()):
        colour = OPTIMIZERS[name].colour
        panel.bar([place], [one.frozen_bytes / 1e6], width=0.55, color=colour)
        fewer = "" if name == BASELINE or not one.fewer_bytes_frozen else f"\n{one.fewer_bytes_frozen:.0f}x fewer"
        panel.annotate(
            human_bytes(one.frozen_bytes) + fewer,
            (place, one.frozen_bytes / 1e6),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            color=colour,
        )
    panel.set_xlim(-0.6, len(found) - 0.4)
    panel.margins(y=0.12)
    panel.set_xticks(range(len(found)), [OPTIMIZERS[name].label for name in found])
    panel.set_title("a step after the freeze", loc="left", fontsize=10.5)
    panel.set_xlabel("optimizer")
    panel.set_ylabel("through the interface, a rank (MB)")
