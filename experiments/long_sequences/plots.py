"""The picture of `experiments.long_sequences`: time forward and training, and memory, all over the length."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from experiments.long_sequences.systems import BATCH, DENSE, FLEX, GATHERED, HEADS, LAYOUTS, MATERIALISED, MODES
from experiments.training import plotting
from experiments.training.plotting import QUIET
from experiments.training.reporting import human_bytes

__all__ = ["draw"]

_DENSE, _PEER = "#22272e", "#e09f3e"
_LAYOUT_COLOURS = ("#d1495b", "#3d6b8f", "#5f9ea0", "#8f6bb3", "#6a994e")
_STYLES: dict[str, dict[str, Any]] = {
    DENSE: {"color": _DENSE, "marker": "s", "linewidth": 2},
    MATERIALISED: {"color": _DENSE, "marker": "s", "linestyle": ":"},
    GATHERED: {"color": _PEER, "marker": "^", "linestyle": "--"},
    FLEX: {"color": _PEER, "marker": "v", "linestyle": ":"},
    **{
        name: {"color": colour, "marker": "o", "linewidth": 2.6 if name == "BigBird" else 1.2}
        for name, colour in zip(LAYOUTS, _LAYOUT_COLOURS, strict=True)
    },
}


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds."""
    figure = Figure(figsize=(16, 6.6))
    forward, training, memory = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.055, right=0.985, top=0.78, bottom=0.22, wspace=0.22)
    for line, finding in enumerate(content["findings"]):
        figure.text(0.02, 0.935 - 0.05 * line, finding, fontsize=14, fontweight="bold")
    made_on, shape = content["machine"], content["shape"]
    subject = f"{shape['heads']} heads of {shape['head_size']}, blocks of {shape['block']}, {shape['dtype']}"
    hardware = f"{made_on['cpu']}, {made_on['threads']} threads"
    figure.text(0.02, 0.845, f"{subject}; medians; made on {hardware}", fontsize=9, color=QUIET)
    _draw_times(forward, content, "forward")
    _draw_times(training, content, "training")
    _draw_memory(memory, content["memory"])
    handles, labels = forward.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, frameon=False)
    plotting.save(figure, path)


def _draw_times(panel: Axes, content: Mapping[str, Any], mode: str) -> None:
    times = content["time"][mode]
    for name, style in _STYLES.items():
        lengths = [length for length, systems in times.items() if name in systems]
        milliseconds = [1e3 * times[length][name]["seconds"][1] for length in lengths]
        panel.plot(lengths, milliseconds, label=name, markersize=4, **style)
    panel.set_title(f"{mode}: milliseconds", loc="left", fontsize=11)
    _scale(panel, list(times))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    _measure_gap(panel, {length: (one[DENSE], one["BigBird"]) for length, one in times.items() if DENSE in one})


def _measure_gap(panel: Axes, pairs: Mapping[int, tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """An arrow from dense attention to BigBird at the longest length of both, with the factor between them."""
    length, (dense, ours) = max(pairs.items())
    high, low = (1e3 * one["seconds"][1] for one in (dense, ours))
    arrow = {"arrowstyle": "->", "color": QUIET}
    panel.annotate("", (length, low), xytext=(length, high), arrowprops=arrow)
    text = f"{ours['times_faster_than_dense']:.1f}x faster"
    place = {"xytext": (6, 0), "textcoords": "offset points"}
    panel.annotate(text, (length, (high * low) ** 0.5), **place, fontsize=9, backgroundcolor="white")


def _draw_memory(panel: Axes, memory: Mapping[str, Any]) -> None:
    extra, of_inputs = memory["extra_peak_bytes"], memory["bytes_of_qkv"]
    for name, style in _STYLES.items():
        points = {length: systems[name] for length, systems in extra.items() if name in systems}
        # Where there is no training, forward is what there is.
        heights = [by_mode.get(MODES[1], by_mode[MODES[0]]) for by_mode in points.values()]
        panel.plot(list(points), heights, markersize=4, **style)
    lengths = list(of_inputs)
    panel.plot(lengths, list(of_inputs.values()), color=QUIET, linewidth=1)
    note = {"textcoords": "offset points", "color": QUIET, "fontsize": 9}
    panel.annotate("bytes of q, k, v", (lengths[-1], of_inputs[lengths[-1]]), xytext=(-4, -14), ha="right", **note)
    scores = [4 * BATCH * HEADS * length**2 for length in lengths]
    panel.plot(lengths, scores, color=QUIET, linewidth=1, linestyle=(0, (1, 3)))
    panel.annotate("one matrix of scores", (lengths[-1], scores[-1]), xytext=(-8, -4), ha="right", **note)
    panel.set_title("training: peak bytes beside q, k, v (FlexAttention: forward)", loc="left", fontsize=11)
    _scale(panel, lengths)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))


def _scale(panel: Axes, lengths: list[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.xaxis.set_major_locator(FixedLocator(lengths))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.tick_params(axis="x", labelsize=8)
    panel.set_xlabel("tokens")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
