"""The picture of the study of DiLoCo's outer step: its rate and momentum, and how a worker takes it in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from experiments.common.machine import in_words
from experiments.frontier.studies import options_of
from experiments.training import plotting

__all__ = ["draw"]

_WORKERS, _EVERY = "2", 30
_COLOURS = {0.0: "#8f6bb3", 0.5: "#2b6ca3", 0.8: "#00798c", 0.9: "#d1495b", 0.95: "#edae49"}
_DEFAULT_ARRIVAL = (1.0, 0.5)
"""Overlap and mix."""
_DEFAULT, _AT_ONCE, _MEAN = (0.6, 0.9, 1.0, 0.5), (0.6, 0.9, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0)
"""Outer rate, momentum, overlap and mix: thinwire's, the first paper's way, and the mean of the workers' weights."""


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds of 2 workers and outer steps 30 steps apart; the first seed throughout."""
    variants = [
        (options, percent_above(content, one))
        for name, one in content["standings"].get(_WORKERS, {}).items()
        for options in [options_of(name)]
        if options["every"] == _EVERY
    ]
    if not variants:
        raise ValueError(f"no variant of {_WORKERS} workers with an outer step every {_EVERY} steps has run")
    grid = [(options, loss) for options, loss in variants if (options["overlap"], options["mix"]) == _DEFAULT_ARRIVAL]
    figure = Figure(figsize=(13, 5.2))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    top = plotting.write_head(figure, _title(variants), _subtitle(content))
    height = figure.get_size_inches()[1]
    figure.subplots_adjust(left=0.06, right=0.97, top=top - 0.35 / height, bottom=0.6 / height, wspace=0.72)
    _draw_grid(left, grid)
    _draw_arrivals(right, [(o, loss) for o, loss in variants if _is_an_arrival(o)])
    for panel, axis in ((left, left.yaxis), (right, right.xaxis)):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}%"))
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    plotting.save(figure, path)


def percent_above(content: Mapping[str, Any], standing: Mapping[str, Any]) -> float:
    """The first seed's loss above AdamW's mean, so that variants of one seed stand beside those of three."""
    return 100 * (standing["first_loss"] / content["baseline"][_WORKERS]["loss"] - 1)


def _title(variants: list[tuple[dict[str, float], float]]) -> str:
    """About the mean of the workers' weights, and about a momentum that workers follow at once, if both have run."""
    by_choice = {(o["outer_lr"], o["outer_momentum"], o["overlap"], o["mix"]): loss for o, loss in variants}
    default, at_once, mean = (by_choice.get(one) for one in (_DEFAULT, _AT_ONCE, _MEAN))
    if default is None or at_once is None or mean is None:
        return f"DiLoCo, {_EVERY} steps, {_WORKERS} workers: what its outer step's options do"
    return (
        f"In 16 outer steps DiLoCo ends {default:.1f}% above AdamW; {mean:.1f}% as a plain mean of weights, "
        f"{at_once:.1f}% without mixing"
    )


def _subtitle(content: Mapping[str, Any]) -> str:
    settings = content["settings"]
    text = "" if settings["corpus"] is None else f" Text: {settings['corpus']}."
    return (
        f"{settings['description']}, {settings['steps']} steps, {_WORKERS} workers. Loss above AdamW's; each at its "
        f"own best learning rate, one seed, which scatter by 0.5%. Lower, and farther left, is better.{text} "
        f"{in_words(content['machine'])}"
    )


def _draw_grid(panel: Axes, grid: list[tuple[dict[str, float], float]]) -> None:
    for momentum, colour in _COLOURS.items():
        points = sorted((o["outer_lr"], loss) for o, loss in grid if o["outer_momentum"] == momentum)
        if points:
            panel.plot(*zip(*points, strict=True), marker="o", color=colour, label=f"momentum {momentum:g}")
    panel.set_xlabel("outer rate")
    panel.set_title("Outer rate and momentum", loc="left", fontsize=11)
    panel.set_ylim(0, None)
    panel.legend(frameon=False, fontsize=9, loc="lower left")


def _is_an_arrival(options: Mapping[str, float]) -> bool:
    chosen = (options["outer_lr"], options["outer_momentum"])
    return (options["overlap"], options["mix"]) != _DEFAULT_ARRIVAL or chosen in ((0.6, 0.9), (0.8, 0.8))


def _draw_arrivals(panel: Axes, variants: list[tuple[dict[str, float], float]]) -> None:
    ordered = sorted(variants, key=lambda one: -one[1])
    labels = [
        f"rate {o['outer_lr']:g}, momentum {o['outer_momentum']:g}, overlap {o['overlap']:g}, mix {o['mix']:g}"
        for o, _ in ordered
    ]
    colours = ["#d1495b" if o["mix"] == 0 else "#00798c" for o, _ in ordered]
    panel.barh(labels, [loss for _, loss in ordered], color=colours, height=0.6)
    for place, (_, loss) in enumerate(ordered):
        panel.annotate(f"{loss:+.1f}%", (loss, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
    panel.set_xlabel("loss above AdamW's; red: mix 0, nothing of a worker's own weights remains")
    panel.set_title("How a worker takes an outer step in", loc="left", fontsize=11)
