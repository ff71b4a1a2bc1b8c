"""The picture of `experiments.lion`: final loss by learning rate; at the best one, loss over steps and over bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.common.machine import in_words
from experiments.lion.findings import Finding, find, titles
from experiments.training import plotting
from experiments.training.optimizers import OPTIMIZERS
from experiments.training.trainer import Outcome

__all__ = ["draw"]


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds."""
    methods, settings = content["methods"], content["settings"]
    swept = {
        name: {float(rate): _loss(loss) for rate, loss in one["final_loss_by_learning_rate"].items()}
        for name, one in methods.items()
    }
    outcomes = {name: [Outcome.of_record(record) for record in one["runs"]] for name, one in methods.items()}
    found = find(swept, outcomes)
    parameters = next(iter(outcomes.values()))[0].parameters
    seeds = len(next(iter(outcomes.values())))
    drawn = "one seed" if seeds == 1 else f"mean of {seeds} seeds, band: one standard deviation"
    subtitle = (
        f"A transformer of {parameters / 1e3:.0f} K parameters learns {settings['corpus']} by characters, "
        f"{content['ranks']} ranks of {settings['windows_a_rank']} windows of {settings['model']['length']}; "
        f"{drawn}; {in_words(content['machine'])}"
    )
    figure, ((by_rate, *over_training),) = plotting.new_figure(1, titles(found)[0], subtitle, columns=3)
    series = [plotting.Series.of(name, runs) for name, runs in outcomes.items()]
    plotting.draw_comparison(over_training, series, "")
    _draw_rates(by_rate, swept, found)
    by_rate.set_title("By learning rate, one seed (circles: the best)", loc="left", fontsize=10.5)
    over_training[0].set_title("Over steps, each at its best rate", loc="left", fontsize=10.5)
    over_training[1].set_title("Over bytes", loc="left", fontsize=10.5)
    plotting.save(figure, path)


def _loss(recorded: float | None) -> float:
    """Null stands for a loss that was not finite."""
    return math.nan if recorded is None else recorded


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
    panel.set_xlabel("peak learning rate (log scale)")
    panel.set_ylabel("validation loss (nats a character)")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", alpha=0.25)
    panel.legend(frameon=False)
