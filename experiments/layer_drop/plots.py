"""The pictures of `experiments.layer_drop`: what is saved and what it costs; and, beside it, the details."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from experiments.common.machine import in_words
from experiments.layer_drop import detail_plots
from experiments.layer_drop.detail_plots import COLOURS, LABELS, LOSS
from experiments.layer_drop.findings import Finding, Run
from experiments.layer_drop.learning import DROPPING, PRE_LN
from experiments.layer_drop.records import Record, read
from experiments.layer_drop.step_time import Saving
from experiments.training import plotting
from experiments.training.plotting import QUIET

__all__ = ["draw"]

_BARS = {"the stack": "time of\nthe layers", "the whole step": "time of\nthe step"}


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds, and the details into a file of that name and `_details`."""
    record = read(content)
    usual = {
        system: [run for run in record.runs if run.system == system and run.learning_rate == record.found.learning_rate]
        for system in (PRE_LN, DROPPING)
    }
    figure = Figure(figsize=(12, 4.9))
    top = plotting.write_head(figure, _title(record.found), _subtitle(content, record))
    over_samples, over_time, times = figure.subplots(1, 3, width_ratios=(1, 1, 0.62))
    figure.subplots_adjust(left=0.065, right=0.985, top=top - 0.06, bottom=0.125, wspace=0.24)
    _draw_over_samples(over_samples, usual, record)
    _draw_over_time(over_time, usual, record)
    _draw_savings(times, record.savings)
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
    plotting.save(figure, path)
    details = path.with_name(f"{path.stem}_details{path.suffix}")
    detail_plots.draw(record, usual[DROPPING], in_words(content["machine"]), details)


def _title(found: Finding) -> str:
    saved, apart = 100 * (1 - found.whole_step), 100 * found.loss_difference
    time = f"saves {saved:.0f}%" if saved > 0 else f"adds {-saved:.0f}%"
    place = f"{abs(apart):.1f}% {'above' if apart > 0 else 'below'}"
    return f"Layer drop {time} of a step's time and ends {place} the loss without"


def _subtitle(content: Mapping[str, Any], record: Record) -> str:
    settings, workload = content["settings"], content["step_time"]["workload"]
    seeds = len({run.seed for run in record.runs if run.learning_rate == record.found.learning_rate})
    drawn = "one seed" if seeds == 1 else f"mean of {seeds} seeds, band: one standard deviation"
    return (
        f"Loss: pre-LN BERT-{settings['model']}, {settings['corpus']}, {record.recipe.sequences_a_step} sequences of "
        f"{settings['sequence_length']} tokens a step, rate {record.found.learning_rate:g}; {drawn}. "
        f"Step time: {workload['size']['layers']} layers of width {workload['size']['width']}, "
        f"{workload['sequences']} sequences of {workload['length']} tokens; {in_words(content['machine'])}"
    )


def _draw_over_samples(panel: Axes, usual: Mapping[str, Sequence[Run]], record: Record) -> None:
    for system, runs in usual.items():
        thousands = np.asarray(runs[0].curve.steps) * record.recipe.sequences_a_step / 1000
        plotting.draw_band(panel, thousands, _losses(runs), colour=COLOURS[system], label=LABELS[system])
    plotting.draw_reference([panel], plotting.Reference(record.entropy, "guessing by token frequency"))
    _limit(panel, [run for runs in usual.values() for run in runs], record.entropy)
    panel.set_xlim(left=0)
    panel.set_xlabel("thousand sequences")
    panel.set_ylabel(LOSS)
    panel.set_title("Loss over samples", loc="left", fontsize=11)
    # Curves fall to the right: the corner above them is free.
    panel.legend(frameon=False, fontsize=9, loc="upper right")


def _draw_over_time(panel: Axes, usual: Mapping[str, Sequence[Run]], record: Record) -> None:
    """The same over minutes; and layer drop at another rate, if it has the baseline's final loss there, with a dot."""
    found = record.found
    drawn = [run for of_system in usual.values() for run in of_system]
    for system, of_system in usual.items():
        minutes = np.mean([run.curve.seconds for run in of_system], axis=0) / 60
        plotting.draw_band(panel, minutes, _losses(of_system), colour=COLOURS[system])
    target = usual[PRE_LN][0].curve.losses[-1]
    quick = next(run for run in record.runs if run.system == DROPPING and run.learning_rate == found.quickest_rate)
    reached = quick.curve.seconds_to(target)
    if reached is not None:
        if found.quickest_rate != found.learning_rate:
            label = f"{LABELS[DROPPING]}, rate {found.quickest_rate:g}, one seed"
            minutes = np.asarray(quick.curve.seconds) / 60
            style = {"color": COLOURS[DROPPING], "linestyle": (0, (2, 1.5)), "label": label}
            panel.plot(minutes, quick.curve.losses, **style)
            drawn.append(quick)
            panel.legend(frameon=False, fontsize=9, loc="upper right")
        panel.plot(reached / 60, target, "o", color=COLOURS[DROPPING], markersize=7)
    plotting.draw_reference([panel], plotting.Reference(record.entropy, "guessing by token frequency"))
    _limit(panel, drawn, record.entropy)
    panel.set_xlim(left=0)
    panel.set_xlabel("minutes of training, validation left out")
    panel.set_ylabel(LOSS)
    panel.set_title(f"Loss over time: {found.time_ratio:.2f} of it for as many steps", loc="left", fontsize=11)


def _draw_savings(panel: Axes, savings: Mapping[str, Saving]) -> None:
    expected = next(saving.expected for saving in savings.values())
    heights = {"layers\nkept": expected, **{_BARS[name]: saving.ratio for name, saving in savings.items()}}
    colours = [QUIET, *[COLOURS[DROPPING]] * len(savings)]
    bars = panel.bar(list(heights), list(heights.values()), color=colours, width=0.6)
    panel.bar_label(bars, [f"{height:.2f}" for height in heights.values()], padding=3)
    plotting.draw_reference([panel], plotting.Reference(1, "all layers"))
    panel.set_ylim(0, 1.2)
    panel.set_xlabel("with layer drop")
    panel.set_ylabel("fraction of that without")
    panel.set_title("A step with layer drop", loc="left", fontsize=11)


def _losses(runs: Sequence[Run]) -> NDArray[np.float64]:
    """Validation losses `[runs, points]`; NaN where a run that broke down has none."""
    points = max(len(run.curve.losses) for run in runs)
    return np.array([run.curve.losses + [math.nan] * (points - len(run.curve.losses)) for run in runs])


def _limit(panel: Axes, runs: Sequence[Run], entropy: float) -> None:
    """Leaves out the fall from the first, untrained loss, which would flatten all the rest."""
    later = [loss for run in runs for loss in run.curve.losses[2:] if math.isfinite(loss)]
    lowest, highest = min([*later, entropy]), max([*later, entropy])
    margin = 0.1 * (highest - lowest) + 1e-3
    panel.set_ylim(lowest - margin, highest + 2 * margin)
