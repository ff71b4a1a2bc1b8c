"""The picture of `experiments.layer_drop`: what is learned over samples and over time, at which learning rates, which
layers are kept, and what a step costs."""

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
from experiments.layer_drop.step_time import Saving
from experiments.training import plotting
from experiments.training.plotting import QUIET
from thinwire.pld import keep_probability

__all__ = ["draw"]

_COLOURS = {POST_LN: "#e3a34f", PRE_LN: "#5b6572", DROPPING: "#d1495b"}
_LABELS = {POST_LN: "post-LN BERT, all layers", PRE_LN: "pre-LN BERT, all layers", DROPPING: "pre-LN BERT, layer drop"}
_SAVING_COLOURS = {"the stack": "#d1495b", "the whole step": "#3d6b8f"}
_DARK = "#22272e"
_LOSS = "validation loss (nats a masked token)"
_SMALL: dict[str, Any] = {"fontsize": 9, "color": QUIET}


def draw(
    found: Finding,
    runs: Sequence[Run],
    savings: Mapping[str, Saving],
    keep_rates: KeepRates,
    recipe: Recipe,
    entropy: float,
    subtitle: str,
    path: Path,
) -> None:
    """Draws and writes the picture; `entropy` is the loss of guessing by token frequency."""
    figure = Figure(figsize=(15, 9.6))
    (over_samples, over_time, by_rate), (theta, rates, times) = figure.subplots(2, 3)
    figure.subplots_adjust(left=0.05, right=0.985, top=0.845, bottom=0.065, wspace=0.2, hspace=0.33)
    for line, sentence in enumerate(found.sentences):
        figure.text(0.05, 0.958 - 0.033 * line, sentence, fontsize=14, fontweight="bold")
    figure.text(0.05, 0.893, subtitle, **_SMALL)
    usual = {
        system: [run for run in runs if run.system == system and run.learning_rate == found.learning_rate]
        for system in (PRE_LN, DROPPING)
    }
    _draw_over_samples(over_samples, usual, recipe, entropy, found)
    _draw_over_time(over_time, usual, runs, found, entropy)
    _draw_by_rate(by_rate, found, entropy)
    _draw_theta(theta, recipe)
    _draw_keep_rates(rates, keep_rates, usual[DROPPING], found)
    _draw_times(times, savings)
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
    plotting.save(figure, path)


def _draw_over_samples(
    panel: Axes, usual: Mapping[str, Sequence[Run]], recipe: Recipe, entropy: float, found: Finding
) -> None:
    for system, runs in usual.items():
        thousands = np.asarray(runs[0].curve.steps) * recipe.sequences_a_step / 1000
        label = f"{_LABELS[system]}: {found.final_loss[system]:.3f}"
        plotting.draw_band(panel, thousands, _losses(runs), colour=_COLOURS[system], label=label)
    plotting.draw_reference([panel], plotting.Reference(entropy, "guessing by token frequency"))
    _limit(panel, [run for runs in usual.values() for run in runs], entropy)
    panel.set_xlim(left=0)
    panel.set_xlabel("thousand sequences")
    panel.set_ylabel(_LOSS)
    seeds = len(usual[PRE_LN])
    panel.set_title(
        f"Loss over samples, rate {found.learning_rate:g}\nmean of {seeds} seeds, band: one standard deviation",
        loc="left",
        fontsize=10.5,
    )
    panel.legend(frameon=False, fontsize=9, loc="lower left")


def _draw_over_time(
    panel: Axes, usual: Mapping[str, Sequence[Run]], runs: Sequence[Run], found: Finding, entropy: float
) -> None:
    drawn = [run for of_system in usual.values() for run in of_system]
    for system, of_system in usual.items():
        minutes = np.mean([run.curve.seconds for run in of_system], axis=0) / 60
        label = f"{_LABELS[system]}, rate {found.learning_rate:g}"
        plotting.draw_band(panel, minutes, _losses(of_system), colour=_COLOURS[system], label=label)
    quick = [run for run in runs if run.system == DROPPING and run.learning_rate == found.quickest_rate]
    if found.quickest_rate != found.learning_rate:
        minutes = np.asarray(quick[0].curve.seconds) / 60
        label = f"{_LABELS[DROPPING]}, rate {found.quickest_rate:g}, one seed"
        panel.plot(minutes, quick[0].curve.losses, color=_COLOURS[DROPPING], linestyle=(0, (2, 1.5)), label=label)
        drawn.append(quick[0])
    baseline = usual[PRE_LN][0].curve
    panel.axhline(baseline.losses[-1], color=_COLOURS[PRE_LN], linewidth=1, linestyle=(0, (1, 2)))
    reached = quick[0].curve.seconds_to(baseline.losses[-1])
    if reached is not None:
        panel.plot(reached / 60, baseline.losses[-1], "o", color=_COLOURS[DROPPING], markersize=7)
    plotting.draw_reference([panel], plotting.Reference(entropy, "guessing by token frequency"))
    _limit(panel, drawn, entropy)
    panel.set_xlim(left=0)
    panel.set_xlabel("minutes of training, validation left out")
    panel.set_title(
        f"Loss over time: as many samples in {found.time_ratio:.2f} of the time\n"
        "dot: where it has the final loss of all layers (dotted, first seed)",
        loc="left",
        fontsize=10.5,
    )
    panel.legend(frameon=False, fontsize=9, loc="lower left")


def _draw_by_rate(panel: Axes, found: Finding, entropy: float) -> None:
    rates = sorted({float(rate) for losses in found.loss_by_rate.values() for rate in losses})
    for system, losses in found.loss_by_rate.items():
        places = [float(rate) for rate in losses]
        heights = [math.nan if loss is None else loss for loss in losses.values()]
        panel.plot(places, heights, "o-", color=_COLOURS[system], linewidth=2, label=_LABELS[system])
        broke = [rate for rate, loss in zip(places, losses.values(), strict=True) if loss is None]
        panel.plot(broke, [entropy] * len(broke), "x", color=_COLOURS[system], markersize=9)
    plotting.draw_reference([panel], plotting.Reference(entropy, "guessing by token frequency"))
    panel.set_xscale("log")
    panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
    panel.minorticks_off()
    panel.set_xlabel("peak learning rate (log scale)")
    panel.set_ylabel("final " + _LOSS)
    panel.set_title(
        "Higher learning rates: which ones hold\nfirst seed, equal samples; x: training broke down",
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
        panel.plot(chances, color=_COLOURS[DROPPING], linewidth=2.4 if last else 1, alpha=1 if last else 0.55)
        name = "θ(t): layer" if last else "layer"
        panel.annotate(
            f"{name} {layer}",
            (recipe.steps, chances[-1]),
            xytext=(-3, 5),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color=_COLOURS[DROPPING],
        )
    panel.set_ylim(0, 1.05)
    panel.set_xlim(0, recipe.steps)
    panel.set_xlabel("steps")
    panel.set_ylabel("probability that a layer is kept")
    panel.set_title(
        f"Schedule of those runs: θ falls to {schedule.theta:g}\ngamma = 100 / steps = {schedule.gamma:.3g}",
        loc="left",
        fontsize=10.5,
    )


def _draw_keep_rates(panel: Axes, settled: KeepRates, dropping: Sequence[Run], found: Finding) -> None:
    trained = [run.keep_rates for run in dropping if run.keep_rates is not None]
    label = f"measured, {len(settled.measured)} layers, settled θ"
    _draw_rates(panel, settled, settled.measured, 3 * np.asarray(settled.standard_error), _COLOURS[DROPPING], label)
    measured = np.mean([rates.measured for rates in trained], axis=0)
    errors = 3 * np.asarray(trained[0].standard_error) / math.sqrt(len(trained))
    _draw_rates(panel, trained[0], measured, errors, "#3d6b8f", "measured, those runs, all seeds")
    panel.plot([], [], color=_DARK, linewidth=1.2, label="formula, bars: 3 standard errors")
    panel.set_ylim(0, 1.05)
    panel.set_xlabel("layer, from the bottom up")
    panel.set_ylabel("fraction of the steps in which it was kept")
    panel.set_title(
        f"Kept as often as the formula says\nat most {found.keep_rate_error:.1f} standard errors away",
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
    layers, floor = next((saving.layers, saving.expected) for saving in savings.values())
    for name, saving in savings.items():
        colour = _SAVING_COLOURS[name]
        ratios = np.asarray(saving.seconds) / np.asarray(saving.seconds_without)
        kept = np.asarray(saving.kept)
        panel.plot(kept + jitter.uniform(-0.2, 0.2, len(kept)), ratios, "o", color=colour, markersize=4, alpha=0.35)
        ends = np.array([kept.min(), kept.max()])
        label = f"{name}: {saving.ratio:.3f} ({1000 * np.median(saving.seconds_without):.0f} ms without drop)"
        panel.plot(ends, saving.ratio + saving.a_layer * (ends - floor * layers), color=colour, label=label)
        panel.plot(floor * layers, saving.ratio, "D", color=colour, markersize=9, markeredgecolor="white")
    places = np.array([0, layers])
    panel.plot(places, places / layers, color=_DARK, linewidth=1, linestyle="--", label="as much as is kept")
    panel.axvline(floor * layers, color=QUIET, linewidth=1, linestyle=(0, (1, 2)))
    panel.annotate(f"expected: {floor:.3f}", (floor * layers, 0.3), xytext=(5, 0), textcoords="offset points", **_SMALL)
    lowest = min(min(saving.kept) for saving in savings.values())
    panel.set_xlim(lowest - 0.6, layers + 0.4)
    panel.set_ylim(0, 1.2)
    panel.set_xlabel(f"layers that a step kept, of {layers}")
    panel.set_ylabel("time over a step's with all layers, in pairs")
    panel.set_title(
        f"Time of a step, {layers} layers, settled θ\ndiamonds: at the number of layers kept in the mean",
        loc="left",
        fontsize=10.5,
    )
    panel.legend(frameon=False, fontsize=9, loc="lower right")


def _losses(runs: Sequence[Run]) -> NDArray[np.float64]:
    """Validation losses `[runs, points]`; NaN where a run that broke down has none."""
    points = max(len(run.curve.losses) for run in runs)
    return np.array([run.curve.losses + [math.nan] * (points - len(run.curve.losses)) for run in runs])


def _limit(panel: Axes, runs: Sequence[Run], entropy: float) -> None:
    """Leaves out the fall from the first, untrained loss, which would flatten all the rest."""
    later = [loss for run in runs for loss in run.curve.losses[2:] if math.isfinite(loss)]
    lowest, highest = min([*later, entropy]), max([*later, entropy])
    margin = 0.1 * (highest - lowest) + 1e-3
    panel.set_ylim(lowest - 3.5 * margin, highest + 2 * margin)
