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
        warmup_steps: steps over which the learning rate rises linearly; then it falls to zero.
        learning_rate: its peak.
        weight_decay: decoupled, on matrices only.
        freeze_step: when a 1-bit optimizer freezes the variance; "auto" lets it decide.
        evaluate_every: steps between validations; the last step is always validated.
        seed: of the weights and the batches.
        local_step_scaler: steps after which 0/1 Adam, once frozen, doubles the interval between two syncs.
        power: of the part of the steps that are left, as which the learning rate falls: 1 is a straight line.
    """

    steps: int
    warmup_steps: int
    learning_rate: float
    weight_decay: float
    freeze_step: int | Literal["auto"]
    evaluate_every: int
    seed: int
    local_step_scaler: int = 32_678
    power: float = 1.0

    @property
    def fixed_freeze_step(self) -> int:
        """`freeze_step` for optimizers that cannot decide; a fifth of the steps where it is "auto"."""
        return max(1, self.steps // 5) if self.freeze_step == "auto" else self.freeze_step

    def is_validated_after(self, step: int) -> bool:
        """Whether the model is validated after step 1, 2, ..., steps."""
        return step >= self.steps or step % self.evaluate_every == 0

    def rate_at(self, step: int) -> float:
        """Learning rate of step 0, 1, ..., steps - 1."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        left = (self.steps - step) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * left**self.power
