"""How long and how fast to train: what the runs of a comparison share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train.

    Attributes:
        steps: optimizer steps in all.
        warmup_steps: steps over which the learning rate rises linearly; then it falls linearly to zero.
        learning_rate: its peak.
        weight_decay: decoupled, on matrices only.
        freeze_step: when a 1-bit optimizer freezes the variance; "auto" lets it decide.
        evaluate_every: steps between validations; the last step is always validated.
        seed: of the weights and the batches.
    """

    steps: int
    warmup_steps: int
    learning_rate: float
    weight_decay: float
    freeze_step: int | Literal["auto"]
    evaluate_every: int
    seed: int

    def rate_at(self, step: int) -> float:
        """Learning rate of step 0, 1, ..., steps - 1."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        return self.learning_rate * (self.steps - step) / max(1, self.steps - self.warmup_steps)
