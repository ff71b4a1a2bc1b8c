"""Ranks as threads that train on one device, whose backwards torch runs on one thread unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tests.fake_device import NAME
from tests.optim.subject import SUBJECTS, Subject
from tests.optim.training import batch, make_model, weights
from thinwire.comm import Communicator, threads

STEPS = 12  # the warmup, and frozen steps of every kind


def train(subject: Subject, device: str, comm: Communicator) -> Tensor:
    model = make_model().to(device)
    optimizer = subject.build(model, comm)
    for step in range(STEPS):
        inputs, wanted = (one.to(device) for one in batch(comm.rank, step))
        optimizer.zero_grad()
        (model(inputs) - wanted).square().mean().backward()
        optimizer.step()
    optimizer.eval()
    return weights(model).cpu()


def steps_as_the_cpu_does(subject: Subject, ranks: int) -> None:
    """The same bits as on the CPU, whose kernels the device has."""
    found = threads.run(partial(train, subject, NAME), ranks, timeout=20)
    expected = threads.run(partial(train, subject, "cpu"), ranks)
    for rank in range(ranks):
        assert torch.equal(found[rank], expected[rank]), f"rank {rank}"


CASES: dict[str, Callable[[], None]] = {
    f"{subject}-{ranks}-ranks": partial(steps_as_the_cpu_does, subject, ranks)
    for number, subject in enumerate(SUBJECTS)
    for ranks in {1 + number % 4, 2 + number % 3}
}
