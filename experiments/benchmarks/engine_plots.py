"""The picture of `experiments.benchmarks.engine`: step time beside DDP's, and memory beside the formulas."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.common.machine import in_words
from experiments.training import plotting
from experiments.training.plotting import QUIET

__all__ = ["draw"]

_OURS, _ONEBIT = "#3d6b8f", "#d1495b"


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds."""
    summary, memory = content["step_time"]["summary"], content["memory"]
    one, two = (summary[f"stage {stage}, fused AdamW, overlap_comm"]["ratio_to_ddp"][1] for stage in (1, 2))
    figure = Figure(figsize=(12, 5.6))
    title = f"A step takes {one:.2f} of DDP's time with ZeRO-1 and {two:.2f} with ZeRO-2 (overlap_comm)"
    subject = f"BERT-{content['model']}, {memory['elements'] / 1e6:.1f} M parameters; {in_words(content['machine'])}"
    top = plotting.write_head(figure, title, f"{content['findings'][1]}. {subject}")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    figure.subplots_adjust(left=0.235, right=0.935, top=top, bottom=0.17, wspace=0.2)
    _draw_times(left, summary, content["step_time"]["ranks"])
    _draw_memory(right, memory)
    plotting.save(figure, path)


def _draw_times(panel: Any, summary: Mapping[str, Mapping[str, Any]], ranks: int) -> None:
    for place, (name, one) in enumerate(summary.items()):
        colour = QUIET if name.startswith("torch") else _ONEBIT if "1-bit" in name else _OURS
        low, middle, high = one["ratio_to_ddp"]
        panel.plot([low, high], [place, place], color=colour, linewidth=7, alpha=0.35, solid_capstyle="butt")
        panel.plot(middle, place, "o", color=colour, markersize=8)
        text = f"{middle:.3f}   {one['milliseconds'][1]:.0f} ms"
        # At the right, where no system and no line is.
        across = panel.get_yaxis_transform()
        panel.text(0.99, place, text, transform=across, ha="right", va="center", fontsize=9)
    panel.axvline(1, color="black", linewidth=1, linestyle="--")
    lowest = min(one["ratio_to_ddp"][0] for one in summary.values())
    highest = max(one["ratio_to_ddp"][2] for one in summary.values())
    panel.set_xlim(lowest - 0.03, highest + 0.6 * (highest - lowest))
    panel.set_yticks(range(len(summary)), list(summary))
    panel.invert_yaxis()
    panel.grid(axis="x", alpha=0.25)
    panel.set_xlabel(f"step time on {ranks} ranks, over DDP's in the same round\nmedian and quartiles; less is better")
    panel.spines[["top", "right"]].set_visible(False)


def _draw_memory(panel: Any, memory: Mapping[str, Any]) -> None:
    elements = memory["elements"]
    systems = memory["systems"]
    places = np.arange(len(systems))
    measured = [one["held"] / elements for one in systems.values()]
    formulas = [one["formula"] / elements for one in systems.values()]
    colours = [_ONEBIT if "1-bit" in name else _OURS for name in systems]
    bars = panel.bar(places, measured, width=0.62, color=colours, label="measured: live tensors")
    panel.hlines(formulas, places - 0.42, places + 0.42, color="black", linewidth=1.6, label="formula")
    panel.bar_label(bars, [f"{value:.2f}" for value in measured], padding=4, fontsize=9)
    panel.set_xticks(
        places, [name.replace(", ", "\n").replace("1-bit Adam", "1-bit\nAdam,\nfrozen") for name in systems]
    )
    panel.tick_params(axis="x", labelsize=9)
    panel.set_ylim(0, 1.12 * max(measured))
    panel.set_ylabel(f"bytes an element on each of {memory['ranks']} ranks, bf16")
    panel.spines["top"].set_visible(False)
    megabytes = panel.secondary_yaxis("right", functions=(lambda y: y * elements / 1e6, lambda y: y * 1e6 / elements))
    megabytes.set_ylabel("MB")
    panel.legend(frameon=False, fontsize=9)
