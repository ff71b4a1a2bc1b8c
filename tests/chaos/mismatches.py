"""Ranks of which one differs from the others, in what it builds or in what it does: an error of ours on every rank, or
the same weights on all of them eight steps later."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.chaos.mismatched_builds import Build, BuildKind, build_kinds
from tests.chaos.mismatched_steps import STEP_KINDS, UNEQUAL_CALLS, Training
from tests.chaos.outcome import Outcome, over_seeds
from tests.chaos.ranks import digest, faults, run_ranks
from tests.optim.subject import SUBJECTS, Subject
from tests.optim.training import exchange_comm, make_model, train
from thinwire.comm import Communicator, threads

STEPS_AFTER = 8
LAST_MOMENT = 16


@dataclass(frozen=True)
class Mismatch:
    """Rank `odd` of `size` differs, by `build` or by `step` in step `moment`."""

    subject: Subject
    size: int
    odd: int
    moment: int
    options: dict[str, Any]
    build: BuildKind | None
    step: str | None
    seed: str

    def __str__(self) -> str:
        kind = self.build.name if self.build is not None else f"{self.step} in {self.moment}"
        return f"{self.seed}: {self.subject}, rank {self.odd} of {self.size}, {kind}, {self.options}"

    @classmethod
    def random(cls, seed: str) -> Mismatch:
        """The one of a seed."""
        source = random.Random(seed)
        subject = source.choice(SUBJECTS)
        size = source.choice((2, 2, 3))
        options: dict[str, Any] = {
            "resync_interval": source.choice((1, 2, 3, 4)),
            "on_drift": source.choice(("repair", "raise")),
        }
        if source.random() < 0.25:
            options["max_norm"] = 0.5
        build = source.choice(build_kinds(subject)) if source.random() < 0.4 else None
        step = None if build is not None else source.choice(list(STEP_KINDS))
        return cls(subject, size, source.randrange(size), source.randrange(LAST_MOMENT), options, build, step, seed)


def train_apart(comm: Communicator, mismatch: Mismatch) -> str:
    """Train on one rank, and say what weights it has in the end."""
    source = random.Random(mismatch.seed + " of the rank")
    model = make_model()
    build = Build(mismatch.subject, list(model.named_parameters()), dict(mismatch.options))
    odd = comm.rank == mismatch.odd
    if odd and mismatch.build is not None:
        mismatch.build.change(source, build)
    given = build.named if build.groups is None else build.groups
    optimizer = build.subject.build_on(given, comm, **build.options)
    training = Training(model, optimizer, source, foreign_state(mismatch.subject))
    for step in range(mismatch.moment + 1 + STEPS_AFTER):
        if odd and step == mismatch.moment and mismatch.step is not None:
            STEP_KINDS[mismatch.step](training, step)
        else:
            training.iterate(step)
        if mismatch.step is not None and step < mismatch.moment + 1 and step % 4 == 0:
            training.saved[step] = optimizer.state_dict()
    optimizer.synchronize_weights()
    exchange_comm(optimizer).barrier()  # who comes to the end alone hears of the others' errors here
    return digest(model)


@cache
def foreign_state(subject: Subject) -> dict[str, Any]:
    """What another optimizer saves."""
    other = next(one for one in SUBJECTS if one.name != subject.name and one.stage == 0)

    def state(comm: Communicator) -> dict[str, Any]:
        model = make_model()
        optimizer = other.build(model, comm)
        train(model, optimizer, range(3))
        found: dict[str, Any] = optimizer.state_dict()
        return found

    return threads.run(state, 1)[0]


def one(seed: str) -> list[str]:
    """What is wrong with the mismatch of that seed."""
    mismatch = Mismatch.random(seed)
    foreign_state(mismatch.subject)
    ends = run_ranks(lambda comm: train_apart(comm, mismatch), mismatch.size)
    names = mismatch.build.names if mismatch.build is not None else "rank"
    found = faults(ends, names, may_wait=mismatch.step in UNEQUAL_CALLS)
    return [f"{mismatch}: {fault}" for fault in found]


def run(count: int, seed: int) -> Outcome:
    """Try so many."""
    return over_seeds(one, count, seed)
