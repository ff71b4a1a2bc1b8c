"""The picture of `experiments.lion`: final loss by learning rate; at the best one, loss over steps and over bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.lion.findings import BASELINE, Finding, sentences
from experiments.training import plotting
from experiments.training.optimizers import OPTIMIZERS
from experiments.training.trainer import Outcome

__all__ = ["draw"]


def draw(
    swept: Mapping[str, Mapping[float, float]],
    outcomes: Mapping[str, Sequence[Outcome]],
    found: Mapping[str, Finding],
    subtitle: str,
    path: Path,
) -> None:
    """Draws and writes the picture."""
    figure, ((by_rate, *over_training),) = plotting.new_figure(1, "; ".join(sentences(found)), subtitle, columns=3)
    series = [plotting.Series.of(name, seeds) for name, seeds in outcomes.items()]
    baseline = plotting.Reference(found[BASELINE].final_loss, f"{OPTIMIZERS[BASELINE].label} in the end", at="left")
    plotting.draw_comparison(over_training, series, "", baseline)
    _draw_rates(by_rate, swept, found)
    seeds = len(next(iter(outcomes.values())))
    over_training[0].set_title(
        "one seed" if seeds == 1 else f"mean of {seeds} seeds, band: one standard deviation", loc="left", fontsize=10.5
    )
    plotting.save(figure, path)


def _draw_rates(panel: Axes, swept: Mapping[str, Mapping[float, float]], found: Mapping[str, Finding]) -> None:
    for name, losses in swept.items():
        one, best = OPTIMIZERS[name], found[name].learning_rate
        panel.plot(list(losses), list(losses.values()), "o-", color=one.colour, markersize=5, label=one.label)
        panel.plot([best], [losses[best]], "o", color=one.colour, markersize=11, fillstyle="none")
        others = [other for other, rates in swept.items() if other != name and best in rates]
        above = any(swept[other][best] < losses[best] for other in others)
        place = {"xytext": (0, 10 if above else -17), "textcoords": "offset points"}
        panel.annotate(f"{best:g}", (best, losses[best]), **place, ha="center", color=one.colour)
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.tick_params(axis="x", labelsize=9)
    panel.set_title("learning rates, one seed; circles: the best", loc="left", fontsize=10.5)
    panel.set_xlabel("peak learning rate (log scale)")
    panel.set_ylabel("validation loss (nats a character)")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", alpha=0.25)
    panel.legend(frameon=False)
