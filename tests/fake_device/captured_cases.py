"""Steps that are captured and replayed, on an emulated GPU whose graphs are recorded launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.fake_device import NAME, Counts, counting
from tests.fake_device.buckets import on_an_emulated_gpu
from tests.optim.subject import FREEZE, SUBJECTS
from tests.optim.training import batch, make_model, weights
from thinwire.comm import Communicator, threads
from thinwire.optim.captured_step import CapturedStep

STEPS = FREEZE + 33
OVERFLOW = FREEZE + 12  # a step that every rank skips
ODD = FREEZE + 15  # a step in which one rank has a batch of another shape, and steps eagerly
LOADED = FREEZE + 20  # a step before which state is loaded, which comes to lie elsewhere
REPLAYS = 20


@dataclass
class Run:
    """What became of one."""

    losses: list[float]
    weights: Tensor
    bytes_sent: int
    skipped: int
    state: dict[str, Any]
    replays: int


def train(comm: Communicator, captures: bool, dtype: torch.dtype) -> Run:
    model = make_model(dtype=dtype).to(NAME)
    optimizer = SUBJECTS[0].build(model, comm, resync_interval=4)

    def work(inputs: Tensor, wanted: Tensor) -> Tensor:
        loss = (model(inputs) - wanted).square().mean()
        loss.backward()
        return loss.detach()

    step = CapturedStep(optimizer, work)
    losses: list[float] = []
    for number in range(STEPS):
        inputs, wanted = (one.to(NAME) for one in batch(comm.rank, number, dtype))
        if number == OVERFLOW and comm.rank == 0:
            inputs = inputs * float("inf")
        if number == ODD and comm.rank == comm.size - 1:
            inputs, wanted = inputs[:5].clone(), wanted[:5].clone()
        if number == LOADED:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + number % 7)
        if captures:
            losses.append(float(step(inputs, wanted)))
        else:
            optimizer.zero_grad()
            losses.append(float(work(inputs, wanted)))
            optimizer.step()
    state, shown = optimizer.rank_tensors(), weights(model).cpu()
    return Run(losses, shown, optimizer.bytes_sent, optimizer.skipped_steps, state, step.replays)


def replays_have_the_bits_of_eager_steps(ranks: int, dtype: torch.dtype) -> None:
    with on_an_emulated_gpu():
        found = threads.run(partial(train, captures=True, dtype=dtype), ranks)
        expected = threads.run(partial(train, captures=False, dtype=dtype), ranks)
    for mine, other in zip(found, expected, strict=True):
        assert mine.replays >= REPLAYS
        assert not other.replays
        assert torch.equal(mine.weights, other.weights)
        assert str(mine.losses) == str(other.losses)  # with a NaN among them
        assert mine.skipped == other.skipped == 1
        assert mine.bytes_sent == other.bytes_sent
        assert all(torch.equal(one.cpu(), other.state[name].cpu()) for name, one in mine.state.items())


def replays_copy_and_wait_once() -> None:
    """All of a capture itself is recorded: what it could not hold would be an error there."""

    def body(comm: Communicator) -> list[Counts]:
        model = nn.Linear(40, 100).to(NAME)
        optimizer = SUBJECTS[0].build(model, comm)

        def work(inputs: Tensor) -> None:
            model(inputs).square().mean().backward()

        step = CapturedStep(optimizer, work)
        seen = []
        for number in range(FREEZE + 8):
            inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(number)).to(NAME)
            with counting() as counts:
                step(inputs)
            seen.append(counts)
        assert step.replays == 3
        return seen[-3:]

    with on_an_emulated_gpu():
        (found,) = threads.run(body, 1)
    for counts in found:
        assert counts.waits.total() == 1, dict(counts.waits)
        copies = {name: count for name, count in counts.launches.items() if name.startswith("copy to")}
        assert copies == {"copy to device": 1, "copy to host": 1}, copies


CASES: dict[str, Callable[[], None]] = {
    "captured-2-ranks": partial(replays_have_the_bits_of_eager_steps, 2, torch.float32),
    "captured-counts": replays_copy_and_wait_once,
    "captured-bf16": partial(replays_have_the_bits_of_eager_steps, 1, torch.bfloat16),
}
