"""The picture of `experiments.benchmarks.kernels`: the bandwidth that each kernel and each peer reached."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.common.machine import in_words
from experiments.training import plotting

__all__ = ["draw"]

_COLOURS = {"copy": "#8a939e", "fill": "#b9c0c8", "kernel": "#d1495b", "eager": "#5b6572"}


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds."""
    results, made_on = content["results"], content["machine"]
    figure = Figure(figsize=(10, 0.36 * len(results) + 1.9))
    device = f"made on {made_on['gpu']}" if "gpu" in made_on else in_words(made_on)
    subtitle = f"Grey: copies, light fills; red: thinwire's kernels; dark: eager torch. Medians; {device}"
    top = plotting.write_head(figure, content["finding"], subtitle)
    panel = figure.subplots()
    figure.subplots_adjust(left=0.31, right=0.98, top=top - 0.03, bottom=0.085)
    speeds = [result["gigabytes_per_second"] for result in results]
    copy = max(speed for speed, result in zip(speeds, results, strict=True) if result["kind"] == "copy")
    panel.barh(range(len(results)), speeds, color=[_COLOURS[result["kind"]] for result in results])
    for place, speed in enumerate(speeds):
        # Inside a long bar, where the line of the copy does not cross it.
        inside = speed > 0.2 * copy
        panel.annotate(
            f"{speed:.1f}",
            (speed, place),
            xytext=(-5 if inside else 5, 0),
            textcoords="offset points",
            ha="right" if inside else "left",
            va="center",
            color="white" if inside else "black",
            fontsize=9,
        )
    panel.axvline(copy, color="black", linewidth=1, linestyle="--")
    label = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center", "fontsize": 9}
    panel.annotate("fastest copy", (copy, 1), xycoords=("data", "axes fraction"), **label)
    panel.set_yticks(range(len(results)), [result["name"] for result in results])
    panel.invert_yaxis()
    panel.set_xlim(0, 1.1 * max(speeds))
    panel.set_xlabel("GB/s, counting only the bytes that the job must move")
    panel.spines[["top", "right"]].set_visible(False)
    plotting.save(figure, path)
