"""One run of a contender on ranks in threads, and a contender's search for its best rate."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from experiments.frontier.contenders import Contender
from experiments.frontier.store import Run, RunStore
from experiments.frontier.subjects import RECIPES, Subject
from experiments.training.learners import LoopLearner
from experiments.training.sweep import best_rate, sweep
from experiments.training.trainer import Outcome, Task, Trainer
from thinwire.comm import Communicator, threads

__all__ = ["learn", "train"]

_TIMEOUT = 600.0


def learn(
    subject: Subject,
    task: Task[Any],
    workers: int,
    contender: tuple[str, Contender],
    seeds: int,
    store: RunStore,
    say: Callable[[str], None],
    *,
    beyond: bool = True,
) -> float:
    """Finds a contender's best rate with the first seed and trains the others at it, but not what the store has.

    Rates `beyond` the ends of those to try first are tried where the best lies there. Returns the first seed's loss
    at the best.
    """
    name, one = contender

    def outcome(rate: float, seed: int) -> Outcome:
        def run() -> Run:
            made = train(subject, task, workers, contender, rate, seed)
            say(f"{made.name}: loss {made.outcome.final_loss:.4f}, {1e3 * made.step_cpu_seconds:.1f} ms of CPU a step")
            return made

        return store.outcome(workers, name, rate, seed, run)

    def first(rate: float) -> float:
        return outcome(rate, 0).final_loss

    rates = subject.rates[one.parent]
    losses = sweep(first, rates) if beyond else {rate: first(rate) for rate in rates}
    best = best_rate(losses)
    for seed in range(1, seeds):
        outcome(best, seed)
    return losses[best]


def train(
    subject: Subject, task: Task[Any], workers: int, contender: tuple[str, Contender], rate: float, seed: int
) -> Run:
    """One training of a contender, given with its name, from the first step to the last; of the worker that sends most
    what it sent."""
    name, one = contender
    plan = subject.plan(one, rate, seed)
    options = {**RECIPES[one.parent].options, **one.options}
    # Made here: ranks in threads share torch's generator, and so would draw from it in any order.
    model = task.build_model(seed)
    models = [copy.deepcopy(model) for _ in range(workers)]
    watched = [_Validating(task) for _ in range(workers)]

    def rank(comm: Communicator) -> Outcome:
        learner = LoopLearner(models[comm.rank], plan, one.optimizer, comm, **options)
        trainer = Trainer(watched[comm.rank], plan, learner, comm)
        while not trainer.finished:
            trainer.advance()
        return trainer.outcome

    started = time.process_time()
    outcome = max(threads.run(rank, workers, _TIMEOUT), key=lambda one: one.bytes_sent)
    spent = time.process_time() - started - sum(task.seconds for task in watched)
    return Run(workers, name, rate, spent / workers / plan.steps, outcome)


class _Validating:
    """A task that knows what processor time its validation took, `seconds` in all, on the thread that ran it."""

    def __init__(self, task: Task[Any]) -> None:
        self.seconds = 0.0
        self._task = task

    def build_model(self, seed: int) -> nn.Module:
        model: nn.Module = self._task.build_model(seed)
        return model

    def training_loss(self, model: Any, seed: int, step: int, rank: int, ranks: int) -> Tensor:
        return self._task.training_loss(model, seed, step, rank, ranks)

    def validation_sum(self, model: Any, rank: int, ranks: int) -> tuple[float, int]:
        started = time.thread_time()
        total = self._task.validation_sum(model, rank, ranks)
        self.seconds += time.thread_time() - started
        return total
