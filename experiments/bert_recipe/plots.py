"""The picture of `experiments.bert_recipe`: loss over steps and over bytes through both phases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.common.machine import in_words
from experiments.training import findings, plotting
from experiments.training.optimizers import OPTIMIZERS
from experiments.training.trainer import Outcome

__all__ = ["draw"]


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds."""
    exact, onebit = content["runs"]
    runs = {name: Outcome.of_record(record) for name, record in content["runs"].items()}
    found = findings.compare([runs[exact]], [runs[onebit]])
    settings, (short, long) = content["settings"], content["phases"]
    figure, axes = plotting.new_figure(
        1,
        findings.headline(OPTIMIZERS[onebit].label, OPTIMIZERS[exact].label, [found], 1),
        f"BERT-{settings['model']} ({runs[exact].parameters / 1e6:.2f} M parameters) learns {settings['corpus']}: "
        f"{settings['batch_size']} sequences of {short['length']} tokens a step, and in the end half as many of "
        f"{long['length']}; {content['ranks']} ranks; {in_words(content['machine'])}",
    )
    reference = plotting.Reference(content["unigram_entropy"], "guessing by token frequency")
    series = [plotting.Series.of(name, [run]) for name, run in runs.items()]
    plotting.draw_comparison(axes[0], series, "validation loss (nats a masked token)", reference)
    axes[0][0].axvline(settings["steps"], color=plotting.QUIET, linewidth=0.8, linestyle=":")
    plotting.save(figure, path)
