"""The picture of `experiments.pretrain_bert`: loss over steps and over bytes, of every optimizer it trained with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.common.machine import in_words
from experiments.training import findings, plotting
from experiments.training.optimizers import OPTIMIZERS, PARENTS
from experiments.training.trainer import Outcome

__all__ = ["draw"]


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds."""
    runs = {name: Outcome.of_record(record) for name, record in content["runs"].items()}
    pairs = [(PARENTS[name], name) for name in runs if PARENTS.get(name) in runs and content["ranks"] > 1]
    titles = [
        findings.headline(
            OPTIMIZERS[onebit].label, OPTIMIZERS[exact].label, [findings.compare([runs[exact]], [runs[onebit]])], 1
        )
        for exact, onebit in pairs
    ]
    title = titles[0] if len(titles) == 1 else "BERT pretraining"
    settings, millions = content["settings"], next(iter(runs.values())).parameters / 1e6
    # Results from before there was a choice do not hold it.
    kind = "pre-LN BERT" if settings.get("pre_ln") else "BERT"
    subtitle = (
        f"{kind}-{settings['model']} ({millions:.2f} M parameters) learns {settings['corpus']}, "
        f"{content['ranks']} ranks, ZeRO stage {settings['zero']}; {in_words(content['machine'])}"
    )
    figure, axes = plotting.new_figure(1, title, subtitle)
    series = [plotting.Series.of(name, [run]) for name, run in runs.items()]
    if len(titles) > 1:
        plotting.title_row(axes[0], "; ".join(titles))
    reference = plotting.Reference(content["unigram_entropy"], "guessing by token frequency")
    plotting.draw_comparison(axes[0], series, "validation loss (nats a masked token)", reference)
    plotting.save(figure, path)
