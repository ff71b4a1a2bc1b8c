"""BERT learns long documents: with sparse attention, with dense attention, or truncated; all for the same time.

The systems take turns of a share of their time, so that whatever else the machine does hits them alike.
"""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from experiments.tasks.batches import MaskedBatches
from experiments.tasks.masking import IGNORED
from experiments.tasks.models import MaskedBert, build_bert
from experiments.tasks.sizes import BertSize
from experiments.tasks.tokens import Tokens
from experiments.training.learners import parameter_groups
from thinwire.sparse_attn import BigBird, extend_position_embedding, sparsify

__all__ = ["SYSTEMS", "DocumentCurve", "DocumentLearner", "LearningPlan", "learners", "train_in_turns"]

SYSTEMS = ("sparse", "dense", "truncated")
"""BigBird through `sparsify`; torch's own attention; torch's own, on the first tokens of each document."""

_REPORT_EVERY = 100
_FEW_WORDS = 64
_WATCHED_WINDOWS = 64


@dataclass(frozen=True)
class LearningPlan:
    """What all systems share.

    Attributes:
        start_steps: taken by one model on windows of all documents, from whose weights the systems then go on; 0 starts
            from random ones.
        windows_a_step: in those steps, or as many tokens.
        documents_a_step: of every system.
        learning_rate: constant after a linear rise over `warmup_steps`, so that losses of any step or time compare.
        weight_decay: decoupled, on matrices only.
        window: tokens of a document that the truncated system sees; a document has a multiple of it.
        block: tokens a block of the sparse system's layout.
        seed: of weights, order of documents and masks.
    """

    start_steps: int
    windows_a_step: int
    documents_a_step: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    window: int
    block: int
    seed: int

    def rate_at(self, step: int) -> float:
        """Learning rate of step 0, 1, ..."""
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps)


@dataclass
class DocumentCurve:
    """Validation loss, in nats a masked token of whole documents, after so many steps and seconds of training."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def at_step(self, step: int) -> float:
        """Loss after that many steps, on the line between the measured points."""
        return float(np.interp(step, self.steps, self.losses))


class DocumentLearner:
    """A BERT with one way to read documents, and its optimizer; batches are functions of (seed, step) only.

    Attributes:
        steps: done so far.
        seconds: spent in them.
        curve: validation losses on the way.
    """

    def __init__(self, model: MaskedBert, window: int | None, tokens: Tokens, plan: LearningPlan) -> None:
        """`window`: tokens that the model reads at a time, the first of each document in training; None: all."""
        self.model = model
        self.steps = 0
        self.seconds = 0.0
        self.curve = DocumentCurve()
        self._window = window
        self._plan = plan
        self._training = MaskedBatches(tokens.training, tokens.vocabulary)
        self._validation = MaskedBatches(tokens.validation, tokens.vocabulary)
        groups = parameter_groups(model, plan.weight_decay)
        self._optimizer = torch.optim.AdamW(groups, lr=plan.learning_rate, fused=True)

    def warm_up(self) -> None:
        """Compiles kernels and fills caches, which is not training; the weights stay."""
        self._backward()
        self._optimizer.zero_grad()

    def train(self, seconds: float) -> None:
        """Takes steps until they have taken that long in all, at least one."""
        started = time.perf_counter()
        before = self.seconds
        while True:
            self.train_step()
            self.seconds = before + time.perf_counter() - started
            if self.seconds >= seconds:
                return

    def record(self) -> float:
        """Validates, and adds a point to the curve."""
        loss = self.validate()
        self.curve.steps.append(self.steps)
        self.curve.seconds.append(self.seconds)
        self.curve.losses.append(loss)
        return loss

    def validate(self, first: int | None = None) -> float:
        """Mean loss of the held-out documents' masked tokens, or of those among the first of each document.

        A model with a window reads all of a document, too, a window at a time, and sees nothing beyond it.
        """
        self.model.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for row in range(len(self._validation.sequences)):
                inputs, labels = self._validation.fixed(range(row, row + 1))
                if first is not None:
                    labels[:, first:] = IGNORED
                loss, chosen = self.model(*self._windows(inputs, labels))
                total, count = total + loss.item(), count + chosen
        self.model.train()
        return total / max(1, count)

    def _windows(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self._window is None:
            return inputs, labels
        return inputs.view(-1, self._window), labels.view(-1, self._window)

    def _backward(self) -> None:
        """Gradients of the next step's mean loss."""
        plan = self._plan
        inputs, labels = self._training.training(plan.seed, self.steps, 0, 1, plan.documents_a_step)
        total, count = self.model(inputs[:, : self._window], labels[:, : self._window])
        (total / max(1, count)).backward()

    def train_step(self) -> None:
        """Moves the weights once."""
        self._backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._plan.rate_at(self.steps)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1


def learners(size: BertSize, tokens: Tokens, plan: LearningPlan) -> dict[str, DocumentLearner]:
    """The three systems, from the same weights: positions of one window, repeated for whole documents."""
    length = tokens.training.shape[1]
    start = _start(size, tokens, plan)
    found = {}
    for name in SYSTEMS:
        model = extend_position_embedding(copy.deepcopy(start), length)
        if name == "sparse":
            sparsify(model, BigBird(num_heads=size.heads, block=plan.block))
        found[name] = DocumentLearner(model, plan.window if name == "truncated" else None, tokens, plan)
    return found


def train_in_turns(systems: dict[str, DocumentLearner], seconds: float, turns: int) -> None:
    """Trains each system for so many seconds, validation left out; it is validated before, and after each turn."""
    for learner in systems.values():
        learner.warm_up()
    for turn in range(turns + 1):
        for name, learner in systems.items():
            if turn:
                learner.train(seconds * turn / turns)
            loss = learner.record()
            done = f"{learner.steps} steps, {learner.seconds:.0f} of {seconds:.0f} s"
            print(f"{name}: {done}, held out {loss:.3f}", file=sys.stderr, flush=True)


def _start(size: BertSize, tokens: Tokens, plan: LearningPlan) -> MaskedBert:
    """A BERT that has read all documents' windows, the first two thirds of the steps a few words of them at a time.

    Over long sequences a new BERT guesses by frequency for thousands of steps; over short ones it soon learns more.
    """
    few = min(_FEW_WORDS, plan.window)
    model = build_bert(size, tokens.vocabulary, few, 0.0, plan.seed)
    on_few_words = plan.start_steps * 2 // 3
    _learn_windows(model, few, on_few_words, tokens, plan)
    extend_position_embedding(model, plan.window)
    _learn_windows(model, plan.window, plan.start_steps - on_few_words, tokens, plan)
    return model


def _learn_windows(model: MaskedBert, window: int, steps: int, tokens: Tokens, plan: LearningPlan) -> None:
    """Train on windows of so many tokens, as many a step as make `windows_a_step` of the plan's."""
    training, validation = (one.reshape(-1, window) for one in (tokens.training, tokens.validation))
    windows = replace(tokens, training=training, validation=validation[:_WATCHED_WINDOWS])
    a_step = plan.windows_a_step * plan.window // window
    learner = DocumentLearner(model, None, windows, replace(plan, documents_a_step=a_step))
    while learner.steps < steps:
        learner.train_step()
        if learner.steps % _REPORT_EVERY == 0 or learner.steps == steps:
            done = f"{learner.steps} of {steps} steps on windows of {window}"
            print(f"start: {done}, held out {learner.validate():.3f}", file=sys.stderr, flush=True)
