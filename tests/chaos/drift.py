"""Long training of every optimizer at every stage, with all that may happen on the way: the replicas stay the same to
the last bit though nobody repairs them, and finite."""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tests.chaos.outcome import Outcome
from tests.chaos.ranks import digest, faults, run_ranks
from tests.optim.subject import SUBJECTS, Subject
from tests.optim.training import batch, make_model, weights
from thinwire.comm import Communicator

SIZE = 2
BETWEEN_COMPARISONS = 50
NEVER = 1 << 30


@dataclass
class Voyage:
    """One rank's training. `chance` draws the same on every rank."""

    subject: Subject
    comm: Communicator
    model: nn.Sequential
    optimizer: Any
    chance: random.Random
    rate: float

    def loss(self, number: int, layers: int) -> Tensor:
        """Of the first so many layers, which is all that its backward reaches."""
        inputs, wanted = batch(self.comm.rank, number)
        for layer in list(self.model)[:layers]:
            inputs = layer(inputs)
        return (inputs.mean(dim=1, keepdim=True) - wanted).square().mean()

    def layers(self) -> int:
        """How many the next backward reaches: now and then not all, where state is sharded not on every rank."""
        some = self.chance.choice((1, 3)) if self.chance.random() < 0.1 else len(self.model)
        only_one_rank = self.chance.random() < 0.5 and self.subject.stage > 0
        return len(self.model) if only_one_rank and self.comm.rank == 0 else some

    def step(self, number: int) -> None:
        """One, with what befalls it."""
        chance, optimizer = self.chance, self.optimizer
        if chance.random() < 0.2:
            optimizer.param_groups[0]["lr"] = self.rate * 10 ** chance.uniform(-3, 0.5)
        optimizer.zero_grad()
        if chance.random() < 0.2:
            with optimizer.no_sync():
                for again in range(chance.choice((1, 2))):
                    self.loss(100_000 * (again + 1) + number, self.layers()).backward()
        overflowing = chance.choice((0, 1)) if chance.random() < 0.05 else None
        factor = chance.choice((math.nan, math.inf, 1e30))
        loss = self.loss(number, self.layers())
        (factor * loss if self.comm.rank == overflowing else loss).backward()
        if chance.random() < 0.05:
            optimizer.zero_grad()  # drops the step
        else:
            optimizer.step()
        if chance.random() < 0.02:
            optimizer.synchronize_weights()


def sail(comm: Communicator, subject: Subject, steps: int, seed: str) -> str:
    """Train on one rank; raises AssertionError where ranks are apart or weights not finite."""
    chance = random.Random(seed)
    model = make_model()
    assert isinstance(model, nn.Sequential)
    max_norm = chance.choice((0.0, 0.5))
    optimizer = subject.build(model, comm, resync_interval=NEVER, max_norm=max_norm)
    voyage = Voyage(subject, comm, model, optimizer, chance, optimizer.param_groups[0]["lr"])
    due = False
    for number in range(steps):
        voyage.step(number)
        due = due or number % BETWEEN_COMPARISONS == 0
        if due and optimizer.in_sync:
            of_rank = comm.all_gather_bytes(digest(model).encode())
            assert len(set(of_rank)) == 1, f"replicas differ after iteration {number}, step {optimizer.steps}"
            assert bool(weights(model).isfinite().all()), f"weights are not finite after iteration {number}"
            due = False
    optimizer.zero_grad()
    optimizer.synchronize_weights()
    return digest(model)


def run(count: int, seed: int) -> Outcome:
    """Train every optimizer at every stage for so many iterations."""
    outcome = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for subject in SUBJECTS:
            ends = run_ranks(lambda comm, subject=subject: sail(comm, subject, count, f"{seed}"), SIZE)
            found = [f"rank {rank}: {end.error}" for rank, end in enumerate(ends) if end.error is not None]
            outcome.note(f"{seed}: {subject}: {fault}" for fault in found or faults(ends))
            outcome.tried += count - 1  # of iterations
    return outcome
