"""The picture of `experiments.long_documents`: loss over time and over steps, sparse, dense and truncated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.common.machine import in_words
from experiments.training import plotting

__all__ = ["draw"]

_COLOURS = {"sparse": "#d1495b", "dense": "#22272e", "truncated": "#3d6b8f"}


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds."""
    settings = content["settings"]
    figure = Figure(figsize=(11, 5.2))
    subtitle = (
        f"{content['findings'][1]}. BERT-{settings['model']} learns {settings['corpus']} in documents of "
        f"{settings['document_length']:,} tokens, {settings['documents_a_step']} a step, after "
        f"{settings['start_steps']:,} steps on windows of {settings['window']:,}; {in_words(content['machine'])}"
    )
    top = plotting.write_head(figure, _title(content), subtitle)
    over_time, over_steps = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=0.07, right=0.98, top=top, bottom=0.11, wspace=0.07)
    for name, run in content["runs"].items():
        curve, style = run["curve"], {"color": _COLOURS[name], "linewidth": 2}
        label = f"truncated to {settings['window']:,} tokens" if name == "truncated" else f"{name} attention"
        over_time.plot([seconds / 60 for seconds in curve["seconds"]], curve["losses"], label=label, **style)
        over_steps.plot(curve["steps"], curve["losses"], **style)
    for panel in (over_time, over_steps):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    _limit(over_time, [run["curve"]["losses"] for run in content["runs"].values()], content["unigram_entropy"])
    # What truncation alone has, ten times the steps, would press the rest together.
    over_steps.set_xlim(0, 1.05 * max(content["runs"][name]["curve"]["steps"][-1] for name in ("sparse", "dense")))
    over_time.set_xlim(left=0)
    over_time.set_ylabel("validation loss (nats a masked token)")
    over_time.set_xlabel("minutes of training")
    over_steps.set_xlabel("steps: as many documents for all")
    over_time.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.9))
    guessing = plotting.Reference(content["unigram_entropy"], "guessing by token frequency")
    plotting.draw_reference([over_time, over_steps], guessing)
    plotting.save(figure, path)


def _title(content: Mapping[str, Any]) -> str:
    losses = content["equal_time"]["losses"]
    ends = f"{losses['sparse']:.2f} sparse, {losses['dense']:.2f} dense"
    return f"Loss on whole documents after {content['equal_time']['minutes']:g} minutes of training: {ends}"


def _limit(panel: Any, losses: Sequence[Sequence[float]], reference: float) -> None:
    """Leaves out the fall from the first, untrained loss, which would flatten all the rest."""
    lowest = min(map(min, losses))
    highest = max(reference, *(curve[min(2, len(curve) - 1)] for curve in losses))
    margin = 0.08 * (highest - lowest)
    panel.set_ylim(lowest - margin, highest + margin)
