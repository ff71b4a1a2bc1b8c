"""The details of `experiments.layer_drop`: learning rates that hold, the schedule, layers kept, single steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from experiments.layer_drop.findings import Finding, Run
from experiments.layer_drop.learning import DROPPING, POST_LN, PRE_LN, KeepRates, Recipe
from experiments.layer_drop.records import Record
from experiments.layer_drop.step_time import Saving
from experiments.training import plotting
from experiments.training.plotting import QUIET
from thinwire.pld import keep_probability

__all__ = ["COLOURS", "LABELS", "LOSS", "draw"]

COLOURS = {POST_LN: "#e3a34f", PRE_LN: "#5b6572", DROPPING: "#d1495b"}
LABELS = {POST_LN: "post-LN BERT, all layers", PRE_LN: "pre-LN BERT, all layers", DROPPING: "pre-LN BERT, layer drop"}
LOSS = "validation loss (nats a masked token)"

_SAVING_COLOURS = {"the stack": "#d1495b", "the whole step": "#3d6b8f"}
_DARK = "#22272e"
_SMALL: dict[str, Any] = {"fontsize": 9, "color": QUIET}


def draw(record: Record, dropping: Sequence[Run], made_on: str, path: Path) -> None:
    """Draws and writes the picture; `dropping` are the runs with layer drop at the usual rate."""
    figure = Figure(figsize=(11, 8.4))
    error = record.found.keep_rate_error
    title = f"Layer drop keeps layers as its formula says, within {error:.1f} standard errors"
    top = plotting.write_head(figure, title, f"Losses of the first seed, at equal samples; {made_on}")
    (by_rate, theta), (rates, times) = figure.subplots(2, 2)
    figure.subplots_adjust(left=0.075, right=0.985, top=top - 0.035, bottom=0.065, wspace=0.2, hspace=0.3)
    _draw_by_rate(by_rate, record.found, record.entropy)
    _draw_theta(theta, record.recipe)
    _draw_keep_rates(rates, record.keep_rates, dropping)
    _draw_times(times, record.savings)
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
    plotting.save(figure, path)


def _draw_by_rate(panel: Axes, found: Finding, entropy: float) -> None:
    rates = sorted({float(rate) for losses in found.loss_by_rate.values() for rate in losses})
    for system, losses in found.loss_by_rate.items():
        places = [float(rate) for rate in losses]
        heights = [math.nan if loss is None else loss for loss in losses.values()]
        panel.plot(places, heights, "o-", color=COLOURS[system], linewidth=2, label=LABELS[system])
        broke = [rate for rate, loss in zip(places, losses.values(), strict=True) if loss is None]
        panel.plot(broke, [entropy] * len(broke), "x", color=COLOURS[system], markersize=9)
    plotting.draw_reference([panel], plotting.Reference(entropy, "guessing by token frequency", at="left"))
    panel.set_xscale("log")
    panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
    panel.minorticks_off()
    panel.margins(y=0.12)
    panel.set_xlabel("peak learning rate (log scale)")
    panel.set_ylabel("final " + LOSS)
    panel.set_title(
        "Which learning rates hold (x: training broke down)",
        loc="left",
        fontsize=10.5,
    )
    panel.legend(frameon=False, fontsize=9)


def _draw_theta(panel: Axes, recipe: Recipe) -> None:
    schedule = recipe.schedule()
    thetas = []
    for step in range(recipe.steps):
        schedule.update_state(step)
        thetas.append(schedule.get_theta())
    layers = recipe.size.layers
    for layer in range(1, layers + 1):
        chances = [keep_probability(layer, layers, theta) for theta in thetas]
        last = layer == layers
        panel.plot(chances, color=COLOURS[DROPPING], linewidth=2.4 if last else 1, alpha=1 if last else 0.55)
        name = "θ(t): layer" if last else "layer"
        panel.annotate(
            f"{name} {layer}",
            (recipe.steps, chances[-1]),
            xytext=(-3, 5),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color=COLOURS[DROPPING],
        )
    panel.set_ylim(0, 1.05)
    panel.set_xlim(0, recipe.steps)
    panel.set_xlabel("steps")
    panel.set_ylabel("probability that a layer is kept")
    panel.set_title(
        f"The schedule: θ falls to {schedule.theta:g} (gamma {schedule.gamma:.3g})",
        loc="left",
        fontsize=10.5,
    )


def _draw_keep_rates(panel: Axes, settled: KeepRates, dropping: Sequence[Run]) -> None:
    trained = [run.keep_rates for run in dropping if run.keep_rates is not None]
    label = f"measured, {len(settled.measured)} layers, settled θ"
    _draw_rates(panel, settled, settled.measured, 3 * np.asarray(settled.standard_error), COLOURS[DROPPING], label)
    measured = np.mean([rates.measured for rates in trained], axis=0)
    errors = 3 * np.asarray(trained[0].standard_error) / math.sqrt(len(trained))
    _draw_rates(panel, trained[0], measured, errors, "#3d6b8f", "measured, those runs, all seeds")
    panel.plot([], [], color=_DARK, linewidth=1.2, label="formula, bars: 3 standard errors")
    panel.set_ylim(0, 1.05)
    panel.set_xlabel("layer, from the bottom up")
    panel.set_ylabel("fraction of the steps in which it was kept")
    panel.set_title(
        "How often each layer was kept",
        loc="left",
        fontsize=10.5,
    )
    panel.legend(frameon=False, fontsize=9, loc="lower left")


def _draw_rates(
    panel: Axes,
    rates: KeepRates,
    measured: Sequence[float] | NDArray[np.float64],
    errors: NDArray[np.float64],
    colour: str,
    label: str,
) -> None:
    numbers = np.arange(1, len(rates.formula) + 1)
    panel.errorbar(numbers, rates.formula, errors, color=_DARK, linewidth=1.2, capsize=3)
    panel.plot(numbers, measured, "o", color=colour, markersize=6, label=label)


def _draw_times(panel: Axes, savings: Mapping[str, Saving]) -> None:
    jitter = np.random.default_rng(0)
    highest = 1.0
    layers, floor = next((saving.layers, saving.expected) for saving in savings.values())
    for name, saving in savings.items():
        colour = _SAVING_COLOURS[name]
        ratios = np.asarray(saving.seconds) / np.asarray(saving.seconds_without)
        kept = np.asarray(saving.kept)
        highest = max(highest, float(ratios.max()))
        panel.plot(kept + jitter.uniform(-0.2, 0.2, len(kept)), ratios, "o", color=colour, markersize=4, alpha=0.35)
        ends = np.array([kept.min(), kept.max()])
        label = f"{name}: {saving.ratio:.3f} ({1000 * np.median(saving.seconds_without):.0f} ms without drop)"
        panel.plot(ends, saving.ratio + saving.a_layer * (ends - floor * layers), color=colour, label=label)
        panel.plot(floor * layers, saving.ratio, "D", color=colour, markersize=9, markeredgecolor="white")
    places = np.array([0, layers])
    panel.plot(places, places / layers, color=_DARK, linewidth=1, linestyle="--", label="as much as is kept")
    panel.vlines(floor * layers, 0, floor, color=QUIET, linewidth=1, linestyle=(0, (1, 2)))
    panel.annotate(
        f"expected: {floor:.3f}", (floor * layers, 0.08), xytext=(5, 0), textcoords="offset points", **_SMALL
    )
    lowest = min(min(saving.kept) for saving in savings.values())
    panel.set_xlim(lowest - 0.6, layers + 0.4)
    # On top, room for the legend.
    panel.set_ylim(0, 1.35 * highest)
    panel.set_xlabel(f"layers that a step kept, of {layers}")
    panel.set_ylabel("time over a step's with all layers, in pairs")
    panel.set_title(
        f"Time of a step by layers kept, of {layers}",
        loc="left",
        fontsize=10.5,
    )
    panel.legend(frameon=False, fontsize=9, loc="upper left")
