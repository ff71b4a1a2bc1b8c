"""The tasks of the convergence study, each with its plan and its words on the picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.tasks.corpus import corpus_name, load
from experiments.tasks.sizes import SIZES
from experiments.tasks.tokens import share_tokens, unigram_entropy
from experiments.training.optimizers import PARENTS
from experiments.training.plans import Plan
from experiments.training.trainer import Task
from thinwire.comm import Communicator

__all__ = ["SUBJECTS", "Subject"]

_VOCABULARY, _LENGTH, _VALIDATION_SEQUENCES = 4096, 32, 1024
_SEQUENCES_A_RANK, _IMAGES_A_RANK = 8, 16


@dataclass(frozen=True)
class Subject:
    """A task, how it is trained, and how it is described.

    Attributes:
        task: what is learned.
        plans: for the first seed, by exact optimizer; what is made from one has its plan.
        rank_items: units that a rank reads in a step.
        unit: what they are.
        description: for the picture.
        reference_loss: of guessing by token frequency, if it learns tokens.
    """

    task: Task[Any]
    plans: dict[str, Plan]
    rank_items: int
    unit: str
    description: str
    reference_loss: float | None

    def plan_of(self, optimizer: str) -> Plan:
        """The plan of an optimizer: its parent's, if it has one."""
        return self.plans[PARENTS.get(optimizer, optimizer)]


def _text(comm: Communicator, corpus: Sequence[Path] | None) -> Subject:
    # Here and below: transformers and scikit-learn take seconds to import, and may not be asked for.
    from experiments.tasks.language import MaskedLanguageTask

    plan = Plan(
        steps=2500,
        warmup_steps=250,
        learning_rate=1e-3,
        weight_decay=0.01,
        freeze_step=500,
        local_step_scaler=250,
        evaluate_every=100,
        seed=0,
    )
    tokens = share_tokens(comm, lambda: load(corpus), _VOCABULARY, _LENGTH, _VALIDATION_SEQUENCES)
    return Subject(
        task=MaskedLanguageTask(tokens, SIZES["tiny"], _SEQUENCES_A_RANK, dropout=0.0),
        plans=_plans(plan, lamb=1e-2, lion=1e-4, muon=2e-3),
        rank_items=_SEQUENCES_A_RANK * _LENGTH,
        unit="tokens",
        description=f"BERT-tiny on {corpus_name(corpus)}",
        reference_loss=unigram_entropy(tokens),
    )


def _digits(comm: Communicator, corpus: Sequence[Path] | None) -> Subject:
    from experiments.tasks.digits import DigitsTask

    plan = Plan(
        steps=600,
        warmup_steps=60,
        learning_rate=1e-3,
        weight_decay=0.01,
        freeze_step=200,
        local_step_scaler=60,
        evaluate_every=20,
        seed=0,
    )
    return Subject(
        task=DigitsTask(_IMAGES_A_RANK),
        plans=_plans(plan, lamb=3e-2, lion=1e-3, muon=2e-3),
        rank_items=_IMAGES_A_RANK,
        unit="images",
        description="A small convolutional network on handwritten digits",
        reference_loss=None,
    )


def _plans(adamw: Plan, **learning_rates: float) -> dict[str, Plan]:
    """AdamW's plan, and those of other exact optimizers, which differ in their peak."""
    others = {name: replace(adamw, learning_rate=learning_rate) for name, learning_rate in learning_rates.items()}
    return {"adamw": adamw, **others}


SUBJECTS: dict[str, Callable[[Communicator, Sequence[Path] | None], Subject]] = {
    "text": _text,
    "digits": _digits,
}
"""Makes a subject, on all ranks together, from the corpus asked for."""
