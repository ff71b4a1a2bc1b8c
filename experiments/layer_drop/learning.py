"""BERT learns with and without progressive layer drop, at one learning rate or another.

All runs take turns of a few steps, so that whatever else the machine does hits them alike.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from experiments.tasks.language import MaskedLanguageTask
from experiments.tasks.sizes import BertSize
from experiments.tasks.tokens import Tokens
from experiments.training.learners import parameter_groups
from experiments.training.plans import Plan
from thinwire.pld import ProgressiveLayerDrop, drop_layers, keep_probability

__all__ = ["DROPPING", "POST_LN", "PRE_LN", "Curve", "DropLearner", "KeepRates", "Recipe", "train_in_turns"]

POST_LN, PRE_LN, DROPPING = "post-LN", "pre-LN", "layer drop"
"""Systems: BERT as published; normalising before each branch; the same with progressive layer drop."""

_CLIP = 1.0


@dataclass(frozen=True)
class Recipe:
    """What all runs share.

    Attributes:
        size: of BERT.
        sequences_a_step: one batch.
        steps: of every run.
        warmup_steps: of the learning rate, which then falls linearly to zero.
        weight_decay: decoupled, on matrices only.
        theta: where the probability of the last layer to be kept settles; gamma is 100 / steps.
        evaluate_every: steps a turn, after which a run is validated.
    """

    size: BertSize
    sequences_a_step: int
    steps: int
    warmup_steps: int
    weight_decay: float
    theta: float
    evaluate_every: int

    def plan(self, learning_rate: float, seed: int) -> Plan:
        """The plan of one run."""
        return Plan(
            steps=self.steps,
            warmup_steps=self.warmup_steps,
            learning_rate=learning_rate,
            weight_decay=self.weight_decay,
            freeze_step="auto",
            evaluate_every=self.evaluate_every,
            seed=seed,
        )

    def schedule(self) -> ProgressiveLayerDrop:
        """A schedule at step 0."""
        return ProgressiveLayerDrop(self.theta, "auto", total_steps=self.steps)


@dataclass
class Curve:
    """Validation loss, in nats a masked token, after so many steps and seconds of training, validation left out."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def seconds_to(self, loss: float) -> float | None:
        """Seconds until the loss was that low, on the line between the measured points; None if it never was."""
        reached = [point for point, value in enumerate(self.losses) if value <= loss]
        if not reached:
            return None
        point = reached[0]
        if point == 0 or not math.isfinite(self.losses[point - 1]):
            return self.seconds[point]
        before = slice(point - 1, point + 1)
        return float(np.interp(-loss, [-value for value in self.losses[before]], self.seconds[before]))


@dataclass(frozen=True)
class KeepRates:
    """How often each layer was kept, from the bottom up; the mean of the formula, and that mean's standard error."""

    measured: list[float]
    formula: list[float]
    standard_error: list[float]

    @classmethod
    def of(cls, measured: Sequence[float], thetas: Sequence[float]) -> KeepRates:
        """For layers that had one forward at each of these θ."""
        layers = len(measured)
        chances = np.array(
            [[keep_probability(layer, layers, theta) for theta in thetas] for layer in range(1, layers + 1)]
        )
        errors = np.sqrt((chances * (1 - chances)).sum(axis=1)) / len(thetas)
        return cls(list(measured), chances.mean(axis=1).tolist(), errors.tolist())


class DropLearner:
    """One run: a BERT and its AdamW; batches are functions of (seed, step) only.

    Attributes:
        system: `POST_LN`, `PRE_LN` or `DROPPING`.
        plan: rate, seed and length.
        steps: done so far.
        curve: validation losses on the way; the last is NaN or infinite where training broke down.
    """

    def __init__(self, system: str, tokens: Tokens, recipe: Recipe, plan: Plan) -> None:
        """Builds the model, with random weights that depend on the plan's seed."""
        self.system = system
        self.plan = plan
        self.steps = 0
        self.curve = Curve()
        self._seconds = 0.0
        self._task = MaskedLanguageTask(tokens, recipe.size, recipe.sequences_a_step, 0.0, pre_ln=system != POST_LN)
        self._model = self._task.build_model(plan.seed)
        self._schedule = recipe.schedule()
        self._drop = drop_layers(self._model, self._schedule, seed=plan.seed) if system == DROPPING else None
        self._optimizer = torch.optim.AdamW(
            parameter_groups(self._model, plan.weight_decay), lr=plan.learning_rate, fused=True
        )

    @property
    def name(self) -> str:
        """What tells this run from the others."""
        return f"{self.system}, rate {self.plan.learning_rate:g}, seed {self.plan.seed}"

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    @property
    def broke_down(self) -> bool:
        """Whether a loss was not finite: such a run is over."""
        return bool(self.curve.losses) and not math.isfinite(self.curve.losses[-1])

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.broke_down or self.steps >= self.plan.steps

    def keep_rates(self) -> KeepRates | None:
        """Of all steps so far; None for a model that keeps all layers."""
        if self._drop is None:
            return None
        schedule = ProgressiveLayerDrop(self._schedule.theta, self._schedule.gamma)
        thetas = []
        for step in range(self.steps):
            schedule.update_state(step)
            thetas.append(schedule.get_theta())
        return KeepRates.of(self._drop.keep_rates, thetas)

    def warm_up(self) -> None:
        """Fills caches, which is not training: the loss of the first batch, as in evaluation."""
        self._model.eval()
        with torch.no_grad():
            self._task.training_loss(self._model, self.plan.seed, 0, 0, 1)
        self._model.train()

    def take_turn(self) -> None:
        """Steps until the next validation is due."""
        started = time.perf_counter()
        for _ in range(min(self.plan.evaluate_every, self.plan.steps - self.steps)):
            self._step()
        self._seconds += time.perf_counter() - started

    def record(self) -> float:
        """Validates, and adds a point to the curve."""
        self._model.eval()
        with torch.no_grad():
            total, count = self._task.validation_sum(self._model, 0, 1)
        self._model.train()
        self.curve.steps.append(self.steps)
        self.curve.seconds.append(self._seconds)
        self.curve.losses.append(total / max(1, count))
        return self.curve.losses[-1]

    def _step(self) -> None:
        self._schedule.update_state(self.steps)
        self._task.training_loss(self._model, self.plan.seed, self.steps, 0, 1).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), _CLIP)
        for group in self._optimizer.param_groups:
            group["lr"] = self.plan.rate_at(self.steps)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1


def train_in_turns(learners: Sequence[DropLearner]) -> None:
    """Trains all to their end, or to where they broke down; each is validated before, and after every turn."""
    for learner in learners:
        learner.warm_up()
        learner.record()
    while running := [learner for learner in learners if not learner.finished]:
        for learner in running:
            learner.take_turn()
            loss = learner.record()
            done = f"{learner.steps} of {learner.plan.steps} steps, {learner.curve.seconds[-1]:.0f} s"
            print(f"{learner.name}: {done}, held out {loss:.3f}", file=sys.stderr, flush=True)
