"""The picture of `experiments.long_sequences`: the time of a training step and its memory, over the length."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from experiments.common.machine import in_words
from experiments.long_sequences.findings import OURS, shown_length
from experiments.long_sequences.systems import DENSE, GATHERED, LAYOUTS, MATERIALISED
from experiments.training import plotting
from experiments.training.plotting import QUIET
from experiments.training.reporting import human_bytes, human_factor

__all__ = ["draw"]

_DENSE, _OURS, _OTHER = "#22272e", "#d1495b", "#a4abb3"
_NAMES = {DENSE: "dense", MATERIALISED: "dense, scores kept", GATHERED: "BigBird by gather"}
"""What the picture calls systems whose own names need an explanation."""

_STYLES: dict[str, dict[str, Any]] = {
    **{name: {"color": _OTHER, "linewidth": 1} for name in (MATERIALISED, GATHERED, *LAYOUTS)},
    DENSE: {"color": _DENSE, "marker": "s", "linewidth": 2.4},
    OURS: {"color": _OURS, "marker": "o", "linewidth": 2.6},
}
"""Of what trains; dense attention and BigBird, of which the title speaks, stand out and lie on top."""


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds."""
    figure = Figure(figsize=(11.5, 5.4))
    shape = content["shape"]
    memory_length, extra = list(content["bigbird"]["training_memory_over_bytes_of_qkv"].items())[-1]
    subtitle = (
        f"At {int(memory_length):,} tokens BigBird's memory is {extra:.1f}x its inputs'. Dense: torch's SDPA; "
        f"{shape['heads']} heads of {shape['head_size']}, blocks of {shape['block']}, {shape['dtype']}; "
        f"{in_words(content['machine'])}, {content['machine']['threads']} threads"
    )
    top = plotting.write_head(figure, _title(content), subtitle)
    time, memory = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.075, right=0.875, top=top, bottom=0.11, wspace=0.62)
    _draw_times(time, content["time"]["training"])
    _draw_memory(memory, content["memory"])
    plotting.save(figure, path)


def _title(content: Mapping[str, Any]) -> str:
    speedups = content["bigbird"]["training_times_faster_than_dense"]
    length = shown_length(speedups)
    return f"At {int(length):,} tokens block-sparse attention trains {human_factor(speedups[length])} as fast as dense"


def _draw_times(panel: Axes, times: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    curves = {}
    for name in _STYLES:
        curves[name] = {int(length): 1e3 * one[name]["seconds"][1] for length, one in times.items() if name in one}
    _draw_curves(panel, curves)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.set_ylabel("milliseconds forward and backward (log scale)")


def _draw_memory(panel: Axes, memory: Mapping[str, Any]) -> None:
    extra = memory["extra_peak_bytes"]
    curves = {
        name: {int(length): systems[name]["training"] for length, systems in extra.items() if name in systems}
        for name in _STYLES
    }
    _draw_curves(panel, curves)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))
    panel.set_ylabel("peak memory beside the inputs, bytes (log scale)")


def _draw_curves(panel: Axes, curves: Mapping[str, Mapping[int, float]]) -> None:
    """Curves over the length, each named at its end, or at the right edge where several end."""
    drawn = {name: curve for name, curve in curves.items() if curve}
    for name, curve in drawn.items():
        panel.plot(list(curve), list(curve.values()), markersize=5, **_STYLES[name])
    lengths = sorted({length for curve in drawn.values() for length in curve})
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.xaxis.set_major_locator(FixedLocator(lengths))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.tick_params(axis="x", labelsize=8)
    panel.set_xlabel("tokens (log scale)")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    low, high = panel.get_ylim()
    panel.set_ylim(low, high)
    to_axes = panel.transScale + panel.transLimits
    ends = {name: max(curve.items()) for name, curve in drawn.items()}
    heights = {name: float(to_axes.transform(end)[1]) for name, end in ends.items()}
    at_the_edge = {name: height for name, height in heights.items() if ends[name][0] == lengths[-1]}
    for name, height in (heights | plotting.spread(at_the_edge, 0.045)).items():
        # Left of the end of a curve that rises, and above it, is nothing.
        inside = {"xytext": (-5, 5), "ha": "right", "va": "bottom"}
        panel.annotate(
            _NAMES.get(name, name),
            (ends[name][0], height),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            **({"xytext": (7, 0), "va": "center"} if name in at_the_edge else inside),
            fontsize=9,
            color=QUIET if _STYLES[name]["color"] == _OTHER else _STYLES[name]["color"],
            fontweight="bold" if name in (DENSE, OURS) else "normal",
        )
