"""The picture: accuracy by learning rate, accuracy of every seed at the best one, bytes of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.common.machine import in_words
from experiments.text_classification.findings import BASELINE, POINTS, Finding, sentence
from experiments.training import plotting
from experiments.training.optimizers import OPTIMIZERS
from experiments.training.plotting import QUIET
from experiments.training.reporting import human_bytes

__all__ = ["draw"]


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds."""
    methods, settings = content["methods"], content["settings"]
    found = {
        name: Finding(**{one.name: method[one.name] for one in fields(Finding)}) for name, method in methods.items()
    }
    errors = {name: method["validation_error_by_learning_rate"] for name, method in methods.items()}
    title = sentence(*next(pair for pair in found.items() if pair[0] != BASELINE))
    subtitle = (
        f"BERT-{settings['model']} tells {' from '.join(settings['classes'])} by {settings['passage_tokens']} tokens, "
        f"{content['ranks']} ranks of {settings['batch_size']} passages, {settings['steps']:,} steps; "
        f"{in_words(content['machine'])}"
    )
    figure = Figure(figsize=(15.5, 5.4))
    rates, seeds, traffic = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.05, right=0.985, top=0.77, bottom=0.12, wspace=0.2)
    plotting.write_head(figure, title, subtitle)
    _draw_rates(
        rates, {name: {float(rate): one for rate, one in tried.items()} for name, tried in errors.items()}, found
    )
    _draw_seeds(seeds, {name: [run["test"] for run in method["runs"]] for name, method in methods.items()}, found)
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


def _draw_seeds(panel: Axes, accuracies: Mapping[str, Sequence[float]], found: Mapping[str, Finding]) -> None:
    baseline = found[BASELINE].test
    panel.axhspan(baseline - POINTS, baseline + POINTS, color=QUIET, alpha=0.15, linewidth=0)
    panel.axhline(baseline, color=OPTIMIZERS[BASELINE].colour, linestyle="--", linewidth=1)
    for place, (name, reached) in enumerate(accuracies.items()):
        one = OPTIMIZERS[name]
        across = place + np.linspace(-0.12, 0.12, len(reached))
        panel.plot(across, reached, "o", color=one.colour, markersize=8, alpha=0.8)
        panel.hlines(found[name].test, place - 0.28, place + 0.28, color=one.colour, linewidth=2.5)
        panel.annotate(
            f"{found[name].test:.2f}%",
            (place + 0.3, found[name].test),
            xytext=(0, 3),
            textcoords="offset points",
            ha="left",
            color=one.colour,
        )
    panel.set_xlim(-0.6, len(accuracies) - 0.2)
    panel.set_xticks(range(len(accuracies)), [OPTIMIZERS[name].label for name in accuracies])
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
