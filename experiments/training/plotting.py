"""What pictures share: their head, and a comparison's loss over steps and over bytes sent, readable in ten seconds."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import ArrayLike, NDArray

from experiments.training.optimizers import OPTIMIZERS
from experiments.training.reporting import human_bytes, human_factor
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
    "spread",
    "title_row",
    "write_head",
]

QUIET = "#6b7480"
"""The colour of what explains: references, arrows, notes."""

_MANY_TIMES = 8
"""Losses that fall to less than this part of the first ones are drawn on a logarithmic axis."""


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


def write_head(figure: Figure, title: str, subtitle: str) -> float:
    """Writes the finding on top of a picture and what it was made with below it; returns the height that is left."""
    width, height = figure.get_size_inches()
    margin, down = 0.25, 0.12
    for text, size, width_of_a_letter, style in (
        (title, 15, 0.6, {"fontweight": "bold"}),
        (subtitle, 9.5, 0.505, {"color": QUIET}),
    ):
        for line in textwrap.wrap(text, int((width - 2 * margin) * 72 / (size * width_of_a_letter))):
            down += 1.4 * size / 72
            figure.text(margin / width, 1 - down / height, line, fontsize=size, **style)
        down += 0.04
    return float(1 - (down + 0.12) / height)


def new_figure(rows: int, title: str, subtitle: str, columns: int = 2) -> tuple[Figure, NDArray[np.object_]]:
    """A figure with panels that share their losses, axes `[rows, columns]`, the finding on top."""
    width, height = 11 if columns < 3 else 4.2 * columns, 3.9 * rows + 1.1
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(rows, columns, sharey="row", squeeze=False)
    # Room for the title of a row, or of a panel.
    top = write_head(figure, title, subtitle) - 0.28 / height
    left, right, bottom = 0.77 / width, 1 - 0.25 / width, 0.58 / height
    figure.subplots_adjust(left=left, right=right, top=top, bottom=bottom, hspace=0.36, wspace=0.08)
    return figure, axes


def draw_comparison(
    axes: Sequence[Axes], series: Sequence[Series], loss_name: str, reference: Reference | None = None
) -> None:
    """Draws the curves over steps on `axes[0]`, and over bytes on `axes[1]`, with a band over the runs."""
    over_steps, over_bytes = axes
    for one in series:
        draw_band(over_steps, one.steps, one.losses, colour=OPTIMIZERS[one.optimizer].colour)
        draw_band(over_bytes, one.bytes_sent, one.losses, colour=OPTIMIZERS[one.optimizer].colour)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
    if reference is not None:
        draw_reference(axes, reference)
    logarithmic = _limit_losses(over_steps, series, reference)
    over_steps.set_ylabel(f"{loss_name}, log scale" if logarithmic else loss_name)
    over_steps.set_xlabel("steps")
    over_steps.set_xlim(left=0)
    _mark_freezes(axes, series)
    if all(one.bytes_sent[0] > 0 for one in series):
        over_bytes.set_xscale("log")
        over_bytes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))
        over_bytes.xaxis.set_minor_formatter(NullFormatter())
        # On the right, room for the last label.
        first, last = min(one.bytes_sent[0] for one in series), max(one.bytes_sent[-1] for one in series)
        over_bytes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if last < 300 * first else (1,)))
        over_bytes.set_xlim(first / 1.3, last * (last / first) ** 0.28)
        over_bytes.set_xlabel("sent by each rank (log scale)")
        _label_ends(over_bytes, series)
        _measure_gap(over_bytes, series)
    else:
        over_bytes.set_xlabel("sent: nothing, by a single rank")


def draw_band(
    panel: Axes, places: ArrayLike, losses: NDArray[np.float64], *, colour: str, label: str | None = None, **style: Any
) -> None:
    """The mean of `losses`, `[runs, points]`, over `places`, and a band of one standard deviation of the runs."""
    mean, spread_of_runs = losses.mean(axis=0), losses.std(axis=0)
    panel.plot(places, mean, color=colour, label=label, **{"linewidth": 2} | style)
    if len(losses) > 1:
        low, high = mean - spread_of_runs, mean + spread_of_runs
        panel.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)


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


def spread(heights: Mapping[str, float], apart: float) -> dict[str, float]:
    """Heights for labels by name, near those given and at least `apart` from one another."""
    groups: list[list[str]] = []
    middles: list[float] = []
    for name in sorted(heights, key=lambda name: heights[name]):
        group, middle = [name], heights[name]
        while groups and middle - middles[-1] < apart * (len(group) + len(groups[-1])) / 2:
            group, _ = groups.pop() + group, middles.pop()
            middle = sum(heights[one] for one in group) / len(group)
        groups.append(group)
        middles.append(middle)
    return {
        name: middle + apart * (place - (len(group) - 1) / 2)
        for group, middle in zip(groups, middles, strict=True)
        for place, name in enumerate(group)
    }


def save(figure: Figure, path: Path) -> None:
    """Writes the picture, replacing the file in one go."""
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=140, format="png")
    partial.replace(path)


def _mark_freezes(axes: Sequence[Axes], series: Sequence[Series]) -> None:
    """A dot on each curve where it went over to 1 bit, and in the first panel a note, above whatever is drawn there."""
    over_steps, over_bytes = axes
    for one in series:
        if one.frozen_at is None:
            continue
        colour = OPTIMIZERS[one.optimizer].colour
        loss = np.interp(one.frozen_at, one.steps, one.losses.mean(axis=0))
        over_steps.plot([one.frozen_at], [loss], marker="o", color=colour, markersize=6)
        sent = np.interp(one.frozen_at, one.steps, one.bytes_sent)
        over_bytes.plot([sent], [loss], marker="o", color=colour, markersize=6)
        later = [(each.losses.mean(axis=0) + each.losses.std(axis=0))[each.steps >= one.frozen_at] for each in series]
        highest = max((losses.max() for losses in later if losses.size), default=loss)
        over_steps.annotate(
            "from here on 1 bit an element",
            (one.frozen_at, max(loss, highest)),
            xytext=(4, 5),
            textcoords="offset points",
            color=colour,
            fontsize=9,
        )


def _limit_losses(panel: Axes, series: Sequence[Series], reference: Reference | None) -> bool:
    """Leaves the first moments out, where the loss falls from a height that would flatten all the rest.

    Where it still falls to a small part, the axis is logarithmic, and the answer is True.
    """
    means = [one.losses.mean(axis=0) for one in series]
    lows = [np.maximum(mean - one.losses.std(axis=0), mean / 2) for mean, one in zip(means, series, strict=True)]
    if not any(np.isfinite(mean).any() for mean in means):
        return False
    lowest = min(np.nanmin(low) for low in lows if np.isfinite(low).any())
    highest = max(np.quantile(mean[np.isfinite(mean)], 0.95) for mean in means if np.isfinite(mean).any())
    if reference is not None:
        highest = max(highest, reference.loss)
    logarithmic = bool(0 < lowest * _MANY_TIMES < highest)
    if logarithmic:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
        height = highest / lowest
        panel.set_ylim(lowest / height**0.26, highest * height**0.1)
    else:
        height = highest - lowest
        panel.set_ylim(lowest - 0.2 * height, highest + 0.1 * height)
    return logarithmic


def _label_ends(panel: Axes, series: Sequence[Series]) -> None:
    """Names at the ends of curves: left of the one that ends first, where nothing is, and right of the others."""
    ends = {one.optimizer: (one.bytes_sent[-1], one.losses[:, -1].mean()) for one in series}
    ends = {name: end for name, end in ends.items() if np.isfinite(end[1])}
    last = max((sent for sent, _ in ends.values()), default=0)
    early = min(ends, key=lambda name: ends[name][0], default="")
    to_axes = panel.transScale + panel.transLimits
    heights = {name: float(to_axes.transform(end)[1]) for name, end in ends.items()}
    style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontweight": "bold"}
    if early and ends[early][0] < 0.8 * last:
        place, colour = (ends[early][0], heights.pop(early)), OPTIMIZERS[early].colour
        where = {"xycoords": ("data", "axes fraction"), "xytext": (-7, 0), "ha": "right"}
        panel.annotate(OPTIMIZERS[early].label, place, color=colour, **where, **style)
    for name, height in spread(heights, 0.075).items():
        where = {"xycoords": ("data", "axes fraction"), "xytext": (7, 0)}
        panel.annotate(OPTIMIZERS[name].label, (ends[name][0], height), color=OPTIMIZERS[name].colour, **where, **style)


def _measure_gap(panel: Axes, series: Sequence[Series]) -> None:
    """An arrow at the foot, from the most to the fewest bytes, with the factor between them."""
    ends = sorted(one.bytes_sent[-1] for one in series)
    if len(ends) < 2:
        return
    across = panel.get_xaxis_transform()
    panel.annotate(
        "",
        (ends[0], 0.04),
        xycoords=across,
        xytext=(ends[-1], 0.04),
        textcoords=across,
        arrowprops={"arrowstyle": "->", "color": QUIET, "shrinkA": 0, "shrinkB": 0},
    )
    panel.text(
        np.sqrt(ends[0] * ends[-1]),
        0.055,
        f"{human_factor(ends[-1] / ends[0])} fewer bytes",
        transform=across,
        ha="center",
        color=QUIET,
    )
