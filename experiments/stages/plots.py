"""The picture of `experiments.stages`: loss by sharding with bands over seeds, and how far runs differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.machine import in_words
from experiments.stages.findings import SYSTEMS, Finding
from experiments.training import plotting
from experiments.training.optimizers import OPTIMIZERS
from experiments.training.plotting import QUIET

__all__ = ["draw"]

_STYLES: dict[str, tuple[str, Any, float]] = {
    "unsharded": ("#5b6572", "-", 4.0),
    "ZeRO-1": ("#d1495b", "-", 1.8),
    "ZeRO-2": ("#3d6b8f", (0, (4, 2)), 1.8),
}
_BF16 = "ZeRO-1 in bf16"
_SAME_BITS = 1e-9
_STAGE_COLOURS = {"1": "#d1495b", "2": "#3d6b8f", "3": "#e3a34f"}
_LIMIT_OF_ADAMW, _LIMIT_OF_ONEBIT = 1e-5, 1e-2


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds."""
    found, sharded = Finding(**content["finding"]), content["sharded"]
    job = sharded["job"]
    figure = Figure(figsize=(12.5, 5.2))
    largest = max(abs(difference) for difference in found.final_difference.values())
    title = f"Sharding 1-bit Adam changes its final loss by {100 * largest:.2f}%"
    seeds = sum(name.startswith("unsharded") for name in sharded["losses"])
    runs = f"Left: BERT-{job['model']}, {sharded['ranks']} ranks, mean of {seeds} seeds, one standard deviation"
    subtitle = f"{'. '.join(found.sentences[1:])}. {runs}; {in_words(content['machine'])}"
    top = plotting.write_head(figure, title, subtitle)
    axes = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
    figure.subplots_adjust(left=0.06, right=0.99, top=top - 0.055, bottom=0.11, wspace=0.36)
    _draw_losses(axes[0], sharded, job)
    _draw_stages(axes[1], found)
    _draw_resumed(axes[2], found)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
    plotting.save(figure, path)


def _draw_losses(panel: Axes, sharded: Mapping[str, Any], job: Mapping[str, Any]) -> None:
    losses = sharded["losses"]
    for system in SYSTEMS:
        runs = [run for name, run in losses.items() if name.startswith(f"{system}, seed")]
        curves = np.asarray([run["validation"] for run in runs])
        steps, middle, spread = runs[0]["validation_steps"], curves.mean(axis=0), curves.std(axis=0)
        colour, line, width = _STYLES[system]
        label = f"{system}, fp32: {middle[-1]:.3f}"
        panel.plot(steps, middle, color=colour, linestyle=line, linewidth=width, label=label)
        panel.fill_between(steps, middle - spread, middle + spread, color=colour, alpha=0.13, linewidth=0)
    half = losses.get(f"{_BF16}, seed 0")
    if half is not None:
        label = f"{_BF16}, one seed: {half['validation'][-1]:.3f}"
        panel.plot(half["validation_steps"], half["validation"], color="#e3a34f", linewidth=1.5, label=label)
    lowest = min(min(run["validation"]) for run in losses.values())
    top = max(run["validation"][1 if len(run["validation"]) > 1 else 0] for run in losses.values())
    entropy = sharded["unigram_entropy"]
    panel.set_ylim(min(lowest, entropy) - 0.1, max(top, entropy) + 0.1)
    plotting.draw_reference([panel], plotting.Reference(entropy, "guessing by token frequency"))
    panel.axvline(job["freeze_step"], ymax=0.5, color=QUIET, linewidth=1)
    panel.annotate(
        " from here on 1 bit an element",
        (job["freeze_step"], 0.03),
        xycoords=("data", "axes fraction"),
        fontsize=9,
        color=QUIET,
    )
    panel.set_xlim(0, job["steps"])
    panel.set_xlabel("steps")
    panel.set_ylabel("validation loss (nats a masked token)")
    panel.set_title("1-bit Adam, sharded and not", loc="left", fontsize=10.5)
    panel.legend(frameon=False, fontsize=9, loc="upper right")


def _draw_stages(panel: Axes, found: Finding) -> None:
    places = np.arange(len(found.stages))
    for number, (stage, colour) in enumerate(_STAGE_COLOURS.items()):
        heights = [max(by_stage[stage], _SAME_BITS) for by_stage in found.stages.values()]
        panel.plot(places + 0.2 * (number - 1), heights, "o", color=colour, label=f"stage {stage}", markersize=8)
    panel.set_xticks(places, list(found.stages))
    panel.set_xlabel("ranks")
    panel.set_ylabel("largest relative difference of losses")
    panel.set_title("AdamW: from stage 0", loc="left", fontsize=10.5)
    _draw_limit(panel, _LIMIT_OF_ADAMW, "limit 1e-5")
    _scale(panel)
    panel.legend(frameon=False, fontsize=9, loc="upper right", bbox_to_anchor=(1, 0.78))


def _draw_resumed(panel: Axes, found: Finding) -> None:
    places = np.arange(len(found.resumed["adamw"]))
    for optimizer, by_ranks in found.resumed.items():
        heights = [max(value, _SAME_BITS) for value in by_ranks.values()]
        colour, label = OPTIMIZERS[optimizer].colour, OPTIMIZERS[optimizer].label
        panel.plot(places, heights, "o-", color=colour, label=label, markersize=8, linewidth=1)
    panel.set_xticks(places, list(found.resumed["adamw"]))
    panel.set_xlabel("ranks that resume a checkpoint of 4")
    panel.set_ylabel("largest relative difference of losses")
    panel.set_title("Resumed: from the uninterrupted run", loc="left", fontsize=10.5)
    _draw_limit(panel, _LIMIT_OF_ADAMW, "limit of AdamW, 1e-5")
    _draw_limit(panel, _LIMIT_OF_ONEBIT, "limit of 1-bit Adam, 1%")
    _scale(panel)
    panel.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 0.08))


def _draw_limit(panel: Axes, limit: float, label: str) -> None:
    panel.axhline(limit, color="black", linewidth=1, linestyle="--")
    panel.annotate(label, (0.01, limit), xycoords=("axes fraction", "data"), xytext=(0, 4), textcoords="offset points")


def _scale(panel: Axes) -> None:
    panel.set_yscale("log")
    panel.set_ylim(_SAME_BITS / 2, 1e-1)
    ticks = [10.0**power for power in range(-9, 0)]
    panel.set_yticks(ticks, ["same bits", *(f"1e{power}" for power in range(-8, 0))])
    panel.minorticks_off()
