"""The picture of a comparison: loss over steps and over bytes sent, readable in ten seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import ArrayLike, NDArray

from experiments.training.optimizers import OPTIMIZERS
from experiments.training.reporting import human_bytes
from experiments.training.trainer import Outcome

__all__ = [
    "QUIET",
    "Reference",
    "Series",
    "draw_band",
    "draw_comparison",
    "draw_reference",
    "new_figure",
    "save",
    "title_row",
]

QUIET = "#8a939e"
"""The colour of what explains: references, arrows, notes."""


@dataclass(frozen=True)
class Series:
    """One optimizer's curves: `losses` is `[runs, points]`, the rest is shared by all runs.

    Attributes:
        optimizer: a name in `OPTIMIZERS`.
        steps: where the loss was measured.
        bytes_sent: what one rank had sent by then, mean of the runs.
        losses: validation loss in nats.
        frozen_at: step of the freeze, mean of the runs; None if there was none.
    """

    optimizer: str
    steps: NDArray[np.float64]
    bytes_sent: NDArray[np.float64]
    losses: NDArray[np.float64]
    frozen_at: float | None

    @classmethod
    def of(cls, optimizer: str, outcomes: Sequence[Outcome]) -> Series:
        """The series of runs that differ in their seed only."""
        freezes = [outcome.frozen_at for outcome in outcomes if outcome.frozen_at is not None]
        return cls(
            optimizer,
            np.asarray(outcomes[0].curve.steps, dtype=np.float64),
            np.mean([outcome.curve.bytes_sent for outcome in outcomes], axis=0),
            np.asarray([outcome.curve.losses for outcome in outcomes]),
            float(np.mean(freezes)) if freezes else None,
        )


@dataclass(frozen=True)
class Reference:
    """A loss to compare with, and what reaches it; its label stands at the right end of the line, or at the left."""

    loss: float
    label: str
    at: Literal["right", "left"] = "right"


def new_figure(rows: int, title: str, subtitle: str, columns: int = 2) -> tuple[Figure, NDArray[np.object_]]:
    """A figure with panels that share their losses, axes `[rows, columns]`, the finding on top."""
    width, height = 5.5 * columns, 4.4 * rows + 1.1
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(rows, columns, sharey="row", squeeze=False)
    left, right = 0.77 / width, 1 - 0.33 / width
    top, bottom = 1 - 1.15 / height, 0.62 / height
    figure.subplots_adjust(left=left, right=right, top=top, bottom=bottom, hspace=0.38, wspace=0.06)
    figure.text(left, 1 - 0.42 / height, title, fontsize=15, fontweight="bold")
    figure.text(left, 1 - 0.72 / height, subtitle, fontsize=9.5, color=QUIET)
    return figure, axes


def draw_comparison(
    axes: Sequence[Axes], series: Sequence[Series], loss_name: str, reference: Reference | None = None
) -> None:
    """Draws the curves over steps on `axes[0]`, and over bytes on `axes[1]`, with a band over the runs."""
    over_steps, over_bytes = axes
    for one in series:
        draw_band(over_steps, one.steps, one.losses, colour=OPTIMIZERS[one.optimizer].colour)
        draw_band(over_bytes, one.bytes_sent, one.losses, colour=OPTIMIZERS[one.optimizer].colour)
        if one.frozen_at is not None:
            _mark_freeze(over_steps, one.steps, one, one.frozen_at)
            _mark_freeze(over_bytes, one.bytes_sent, one, one.frozen_at)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
    if reference is not None:
        draw_reference(axes, reference)
    _limit_losses(over_steps, series, reference)
    over_steps.set_ylabel(loss_name)
    over_steps.set_xlabel("steps")
    over_steps.set_xlim(left=0)
    if all(one.bytes_sent[0] > 0 for one in series):
        over_bytes.set_xscale("log")
        over_bytes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        over_bytes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))
        over_bytes.xaxis.set_minor_formatter(NullFormatter())
        # On the right, room for the last label.
        sent = [one.bytes_sent for one in series]
        over_bytes.set_xlim(min(one[0] for one in sent) / 1.3, 1.9 * max(one[-1] for one in sent))
        over_bytes.set_xlabel("sent by each rank (log scale)")
        _label_ends(over_bytes, series)
        _measure_gap(over_bytes, series)
    else:
        over_bytes.set_xlabel("sent: nothing, by a single rank")


def draw_band(
    panel: Axes, places: ArrayLike, losses: NDArray[np.float64], *, colour: str, label: str | None = None, **style: Any
) -> None:
    """The mean of `losses`, `[runs, points]`, over `places`, and a band of one standard deviation of the runs."""
    mean, spread = losses.mean(axis=0), losses.std(axis=0)
    panel.plot(places, mean, color=colour, label=label, **{"linewidth": 2} | style)
    if len(losses) > 1:
        panel.fill_between(places, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)


def draw_reference(axes: Sequence[Axes], reference: Reference) -> None:
    """A dashed line across all panels, named in the first."""
    for panel in axes:
        panel.axhline(reference.loss, color=QUIET, linestyle=(0, (4, 3)), linewidth=1)
    axes[0].annotate(
        reference.label,
        (1 if reference.at == "right" else 0, reference.loss),
        xycoords=("axes fraction", "data"),
        xytext=(-4 if reference.at == "right" else 4, 4),
        textcoords="offset points",
        ha=reference.at,
        color=QUIET,
        fontsize=9,
    )


def title_row(axes: Sequence[Axes], title: str) -> None:
    """Writes a line above a pair of panels."""
    axes[0].set_title(title, loc="left", fontsize=11)


def save(figure: Figure, path: Path) -> None:
    """Writes the picture, replacing the file in one go."""
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=140, format="png")
    partial.replace(path)


def _mark_freeze(panel: Axes, places: NDArray[np.float64], one: Series, frozen_at: float) -> None:
    place = np.interp(frozen_at, one.steps, places)
    loss = np.interp(frozen_at, one.steps, one.losses.mean(axis=0))
    colour = OPTIMIZERS[one.optimizer].colour
    panel.plot([place], [loss], marker="o", color=colour, markersize=6)
    panel.annotate(
        "from here on 1 bit an element",
        (place, loss),
        xytext=(8, 10),
        textcoords="offset points",
        color=colour,
        fontsize=9,
    )


def _limit_losses(panel: Axes, series: Sequence[Series], reference: Reference | None) -> None:
    """Leaves the first moments out, where the loss falls from a height that would flatten all the rest."""
    means = [one.losses.mean(axis=0) for one in series]
    finite = [mean[np.isfinite(mean)] for mean in means if np.isfinite(mean).any()]
    if not finite:
        return
    lowest = min(mean.min() for mean in finite)
    highest = max(np.quantile(mean, 0.95) for mean in finite)
    if reference is not None:
        highest = max(highest, reference.loss)
    margin = 0.08 * (highest - lowest)
    panel.set_ylim(lowest - 2 * margin, highest + margin)


def _label_ends(panel: Axes, series: Sequence[Series]) -> None:
    for one in series:
        panel.annotate(
            OPTIMIZERS[one.optimizer].label,
            (one.bytes_sent[-1], one.losses[:, -1].mean()),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=OPTIMIZERS[one.optimizer].colour,
            fontweight="bold",
        )


def _measure_gap(panel: Axes, series: Sequence[Series]) -> None:
    """An arrow at the foot, from the most to the fewest bytes, with the factor between them."""
    ends = sorted(one.bytes_sent[-1] for one in series)
    if len(ends) < 2:
        return
    across = panel.get_xaxis_transform()
    panel.annotate(
        "",
        (ends[0], 0.05),
        xycoords=across,
        xytext=(ends[-1], 0.05),
        textcoords=across,
        arrowprops={"arrowstyle": "->", "color": QUIET, "shrinkA": 0, "shrinkB": 0},
    )
    panel.text(
        np.sqrt(ends[0] * ends[-1]),
        0.07,
        f"{ends[-1] / ends[0]:.1f}x fewer bytes",
        transform=across,
        ha="center",
        color=QUIET,
    )
