"""What each optimizer was measured to cost in loss: the figures of experiments/results, which a test compares."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.plan.methods import DILOCO, POWERSGD, Method
from thinwire.plan.published_losses import local_updates_in_words

__all__ = ["ACCEPTED", "LOSSES", "MeasuredLoss", "keeps_the_loss", "loss_in_words", "loss_of"]

ACCEPTED = 0.02
"""The final loss above the exact optimizer's, relative, that a recommendation may cost."""
_LEAST_SEEDS = 3


@dataclass(frozen=True)
class MeasuredLoss:
    """`difference`: of the final loss beside that of `beside`, relative, negative where it was lower; `where` it was
    measured, and on how many `seeds`."""

    difference: float
    beside: str
    where: str
    seeds: int


LOSSES: dict[str, MeasuredLoss] = {
    "onebit-adam": MeasuredLoss(-0.001, "AdamW", "BERT-tiny on text", 3),
    "onebit-lamb": MeasuredLoss(0.031, "LAMB", "BERT-tiny on text", 3),
    "zero-one-adam": MeasuredLoss(0.039, "AdamW", "BERT-tiny on text", 3),
    "onebit-lion": MeasuredLoss(0.072, "AdamW", "a small GPT on text", 3),
}
"""By algorithm. Averages that are exact, or in bf16, count as costing nothing (Agarwal et al., MLSys 2022)."""


def loss_of(method: Method) -> MeasuredLoss | None:
    """None where it was not measured, or nothing is lost."""
    return LOSSES.get(method.algorithm)


def keeps_the_loss(method: Method) -> bool:
    """Whether it may be recommended: exact averages, or a loss that was measured, on 3 seeds, and is near enough.

    PowerSGD may not: what it loses depends on the model, and in our races rank 16 alone reached DDP's loss. Nor may
    DiLoCo, of which others have published what it loses.
    """
    if method.algorithm in (POWERSGD, DILOCO):
        return False
    if not method.is_one_bit:
        return True
    measured = loss_of(method)
    return measured is not None and measured.difference <= ACCEPTED and measured.seeds >= _LEAST_SEEDS


def loss_in_words(method: Method, parameters: int, workers: int) -> str:
    """What is known of it, for one line; `workers`: that train by themselves, with DiLoCo."""
    if method.algorithm == DILOCO:
        return local_updates_in_words(parameters, workers)
    if method.algorithm == POWERSGD:
        return "speed only: its loss has to be tried; in our races rank 16 alone reached DDP's"
    if not method.is_one_bit:
        return "none: averages are exact, or in bf16"
    measured = loss_of(method)
    if measured is None:
        return "not measured"
    seeds = "1 seed" if measured.seeds == 1 else f"{measured.seeds} seeds"
    return f"{measured.difference:+.1%} beside {measured.beside} ({measured.where}, {seeds})"
