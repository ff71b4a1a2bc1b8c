"""The picture of a comparison: loss over steps and over bytes sent, readable in ten seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from experiments.training.reporting import human_bytes
from experiments.training.trainer import Outcome

__all__ = ["COLOURS", "LABELS", "Reference", "Series", "draw_comparison", "new_figure", "save", "title_row"]

LABELS = {
    "adamw": "AdamW",
    "onebit-adam": "1-bit Adam",
    "zero-one-adam": "0/1 Adam",
    "lamb": "LAMB",
    "onebit-lamb": "1-bit LAMB",
}
COLOURS = {
    "adamw": "#5b6572",
    "onebit-adam": "#d1495b",
    "zero-one-adam": "#edae49",
    "lamb": "#5b6572",
    "onebit-lamb": "#00798c",
}
_QUIET = "#8a939e"


@dataclass(frozen=True)
class Series:
    """One optimizer's curves: `losses` is `[runs, points]`, the rest is shared by all runs.

    Attributes:
        optimizer: a key of `LABELS`.
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
    """A loss to compare with, and what reaches it."""

    loss: float
    label: str


def new_figure(rows: int, title: str, subtitle: str) -> tuple[Figure, NDArray[np.object_]]:
    """A figure with `rows` pairs of panels, axes `[rows, 2]`, the finding on top."""
    height = 4.4 * rows + 1.1
    figure, axes = plt.subplots(rows, 2, figsize=(11, height), sharey="row", squeeze=False)
    figure.subplots_adjust(left=0.07, right=0.97, top=1 - 1.15 / height, bottom=0.62 / height, hspace=0.38, wspace=0.06)
    figure.text(0.07, 1 - 0.42 / height, title, fontsize=15, fontweight="bold")
    figure.text(0.07, 1 - 0.72 / height, subtitle, fontsize=9.5, color=_QUIET)
    return figure, axes


def draw_comparison(
    axes: Sequence[Axes], series: Sequence[Series], loss_name: str, reference: Reference | None = None
) -> None:
    """Draws the curves over steps on `axes[0]`, and over bytes on `axes[1]`, with a band over the runs."""
    over_steps, over_bytes = axes
    for one in series:
        _draw_curve(over_steps, one.steps, one)
        _draw_curve(over_bytes, one.bytes_sent, one)
        if one.frozen_at is not None:
            _mark_freeze(over_steps, one.steps, one, one.frozen_at)
            _mark_freeze(over_bytes, one.bytes_sent, one, one.frozen_at)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
    if reference is not None:
        _draw_reference(axes, reference)
    _limit_losses(over_steps, series, reference)
    over_steps.set_ylabel(loss_name)
    over_steps.set_xlabel("steps")
    over_steps.set_xlim(left=0)
    if all(one.bytes_sent[0] > 0 for one in series):
        over_bytes.set_xscale("log")
        over_bytes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
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


def title_row(axes: Sequence[Axes], title: str) -> None:
    """Writes a line above a pair of panels."""
    axes[0].set_title(title, loc="left", fontsize=11)


def save(figure: Figure, path: Path) -> None:
    """Writes the picture, replacing the file in one piece, and frees the figure."""
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=140, format="png")
    plt.close(figure)
    partial.replace(path)


def _draw_curve(panel: Axes, places: NDArray[np.float64], one: Series) -> None:
    colour = COLOURS[one.optimizer]
    mean, spread = one.losses.mean(axis=0), one.losses.std(axis=0)
    panel.plot(places, mean, color=colour, linewidth=2)
    if len(one.losses) > 1:
        panel.fill_between(places, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)


def _mark_freeze(panel: Axes, places: NDArray[np.float64], one: Series, frozen_at: float) -> None:
    place = np.interp(frozen_at, one.steps, places)
    loss = np.interp(frozen_at, one.steps, one.losses.mean(axis=0))
    panel.plot([place], [loss], marker="o", color=COLOURS[one.optimizer], markersize=6)
    panel.annotate(
        "from here on 1 bit an element",
        (place, loss),
        xytext=(8, 10),
        textcoords="offset points",
        color=COLOURS[one.optimizer],
        fontsize=9,
    )


def _draw_reference(axes: Sequence[Axes], reference: Reference) -> None:
    for panel in axes:
        panel.axhline(reference.loss, color=_QUIET, linestyle=(0, (4, 3)), linewidth=1)
    axes[0].annotate(
        reference.label,
        (1, reference.loss),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        color=_QUIET,
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
            LABELS[one.optimizer],
            (one.bytes_sent[-1], one.losses[:, -1].mean()),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=COLOURS[one.optimizer],
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
        arrowprops={"arrowstyle": "->", "color": _QUIET, "shrinkA": 0, "shrinkB": 0},
    )
    panel.text(
        np.sqrt(ends[0] * ends[-1]),
        0.07,
        f"{ends[-1] / ends[0]:.1f}x fewer bytes",
        transform=across,
        ha="center",
        color=_QUIET,
    )
