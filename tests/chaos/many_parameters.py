"""Thousands of tiny parameters: the ranks stay alike, a resume goes on bit for bit, a step makes no more collectives
than it has buckets for, and the Python calls of a step grow with the parameters, not with their square."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from tests.chaos.outcome import Outcome
from tests.chaos.ranks import digest, faults, run_ranks
from tests.optim.subject import FREEZE, SUBJECTS, Subject
from tests.optim.training import exchange_comm
from thinwire.comm import Communicator

SIZE = 2
STEPS_AFTER = 4
MOST_GROWTH = 1.25
"""Of Python calls for each parameter, where there are four times as many."""
# Two for each bucket, one vote, an agreement on arrival or absence with its two gathers, a comparison of weights.
MOST_CALLS_BESIDE_BUCKETS = 8


class Many(nn.Module):
    """So many parameters of 1 to 5 elements."""

    def __init__(self, count: int, seed: str) -> None:
        super().__init__()
        chance = random.Random(seed)
        generator = torch.Generator().manual_seed(0)
        self.all = nn.ParameterList(torch.randn(chance.randint(1, 5), generator=generator) for _ in range(count))

    def loss(self, rank: int, step: int) -> Tensor:
        """Of which every parameter's gradient differs from rank to rank and step to step."""
        wanted = torch.Generator().manual_seed(1000 * rank + step)
        return (torch.cat(list(self.all)) - torch.randn(1, generator=wanted)).square().mean()


@dataclass
class CallCount:
    """How many Python functions this thread has called."""

    calls: int = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += event == "call"


def iterate(model: Many, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model.loss(optimizer.comm.rank, step).backward()
    optimizer.step()


def train(comm: Communicator, subject: Subject, count: int, seed: str) -> tuple[str, float]:
    """The digest of a rank's weights, and its Python calls for each parameter in a frozen step.

    Raises AssertionError where something is wrong.
    """
    model = Many(count, seed)
    optimizer = subject.build(model, comm, bucket_bytes=1 << 14)
    for step in range(FREEZE + 2):
        iterate(model, optimizer, step)
    counted, traffic = CallCount(), exchange_comm(optimizer).traffic
    before = traffic.calls
    with counted.counting():
        iterate(model, optimizer, FREEZE + 2)
    buckets = -(-sum(one.numel() for one in model.parameters()) * 4 // (1 << 14)) + 1
    made = traffic.calls - before
    assert made <= 2 * buckets + MOST_CALLS_BESIDE_BUCKETS, f"{made} collectives in a step of {buckets} buckets"

    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    resumed = Many(count, seed)
    again = subject.build(resumed, comm, bucket_bytes=1 << 14)
    for part, state in zip((resumed, again), torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    for of_one, trained_by in ((model, optimizer), (resumed, again)):
        for step in range(FREEZE + 3, FREEZE + 3 + STEPS_AFTER):
            iterate(of_one, trained_by, step)
        trained_by.synchronize_weights()
    assert digest(model) == digest(resumed), "what was resumed goes on otherwise"
    return digest(model), counted.calls / count


def run(count: int, seed: int) -> Outcome:
    """Train so many parameters, and a quarter of them, with every optimizer at every stage."""
    outcome = Outcome()
    for subject in SUBJECTS:
        ends = [
            run_ranks(lambda comm, some=some, subject=subject: train(comm, subject, some, f"{seed}"), SIZE)
            for some in (count // 4, count)
        ]
        found = [f"rank {rank}: {end.error!r}" for few in ends for rank, end in enumerate(few) if end.error is not None]
        if not found:
            few, many = (max(end.result[1] for end in of_some) for of_some in ends)
            if many > MOST_GROWTH * few:
                found.append(f"{few:.0f} Python calls for each of {count // 4} parameters, {many:.0f} of {count}")
            for end in ends[1]:
                end.result = end.result[0]
            found += faults(ends[1])
        outcome.note(f"{seed}: {subject} with {count} parameters: {fault}" for fault in found)
        outcome.tried += count - 1  # of parameters
    return outcome
