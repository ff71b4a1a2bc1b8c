"""The picture of `experiments.convergence`: a row a task and optimizer, beside the exact one it is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.machine import in_words
from experiments.training import findings, plotting
from experiments.training.findings import Finding
from experiments.training.optimizers import OPTIMIZERS, PARENTS
from experiments.training.trainer import Outcome

__all__ = ["draw"]

_LOSSES = {"text": "validation loss (nats a masked token)", "digits": "validation loss (nats an image)"}


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds."""
    runs = {
        (task, optimizer): [Outcome.of_record(record) for record in records]
        for task, one in content["tasks"].items()
        for optimizer, records in one["runs"].items()
    }
    found = {
        (task, onebit): findings.compare(runs[task, PARENTS[onebit]], outcomes)
        for (task, onebit), outcomes in runs.items()
        if onebit in PARENTS
    }
    seeds = len(next(iter(runs.values())))
    drawn = "one seed" if seeds == 1 else f"mean of {seeds} seeds, band: one standard deviation"
    subtitle = f"{content['ranks']} ranks; {drawn}; {in_words(content['machine'])}"
    figure, axes = plotting.new_figure(len(found), _title(found, seeds), subtitle)
    for row, ((task, onebit), finding) in zip(axes, found.items(), strict=True):
        one = content["tasks"][task]
        series = [plotting.Series.of(optimizer, runs[task, optimizer]) for optimizer in (PARENTS[onebit], onebit)]
        guessing = one["reference_loss"]
        reference = None if guessing is None else plotting.Reference(guessing, "guessing by token frequency")
        plotting.draw_comparison(row, series, _LOSSES[task], reference)
        plotting.title_row(row, f"{one['description']}, {OPTIMIZERS[onebit].label}: {_in_words(onebit, finding)}")
    plotting.save(figure, path)


def _title(found: Mapping[tuple[str, str], Finding], seeds: int) -> str:
    onebit = _names([optimizer for _, optimizer in found])
    exact = _names([PARENTS[optimizer] for _, optimizer in found])
    return findings.headline(onebit or "A 1-bit optimizer", exact or "its exact parent", list(found.values()), seeds)


def _names(optimizers: Sequence[str]) -> str | None:
    """The label of the only one there is; None where there are several."""
    return OPTIMIZERS[optimizers[0]].label if len(set(optimizers)) == 1 else None


def _in_words(onebit: str, finding: Finding) -> str:
    """The loss, and whether its distance is one that seeds make too; the bytes are in the panel."""
    loss = finding.claim.partition(", ")[0]
    if 0 < finding.onebit_loss - finding.exact_loss <= finding.exact_deviation:
        return f"{loss}, within one standard deviation of {OPTIMIZERS[PARENTS[onebit]].label}'s"
    return loss
