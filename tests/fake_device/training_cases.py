"""Ranks as threads that train on one device, whose backwards torch runs on one thread unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.fake_device import NAME
from tests.optim.subject import SUBJECTS, Subject
from tests.optim.training import batch, make_model, weights
from thinwire.comm import Communicator, threads

STEPS = 12  # the warmup, and frozen steps of every kind


def train(subject: Subject, device: str, dtype: torch.dtype, options: dict[str, Any], comm: Communicator) -> Tensor:
    model = make_model(dtype=dtype).to(device)
    optimizer = subject.build(model, comm, **options)
    for step in range(STEPS):
        inputs, wanted = (one.to(device) for one in batch(comm.rank, step, dtype))
        optimizer.zero_grad()
        (model(inputs) - wanted).square().mean().backward()
        optimizer.step()
    optimizer.eval()
    return weights(model).cpu()


def steps_as_the_cpu_does(
    subject: Subject, ranks: int, dtype: torch.dtype = torch.float32, options: dict[str, Any] | None = None
) -> None:
    """The same bits as on the CPU, whose kernels the device has."""
    found = threads.run(partial(train, subject, NAME, dtype, options or {}), ranks, timeout=60)
    expected = threads.run(partial(train, subject, "cpu", dtype, options or {}), ranks)
    for rank in range(ranks):
        assert torch.equal(found[rank], expected[rank]), f"rank {rank}"


OFFLOADED = {"offload": True, "pin_memory": True}

CASES: dict[str, Callable[[], None]] = (
    {
        f"{subject}-{ranks}-ranks": partial(steps_as_the_cpu_does, subject, ranks)
        for number, subject in enumerate(SUBJECTS)
        for ranks in {1 + number % 4, 2 + number % 3}
    }
    | {
        f"{subject}-offloaded-{dtype}": partial(steps_as_the_cpu_does, subject, 2, dtype, OFFLOADED)
        for subject in SUBJECTS
        for dtype in (torch.float32, torch.bfloat16)
        if subject.packs
    }
    | {
        # Leg 2 has to pass on what only some ranks of a node have heard.
        "nodes": partial(steps_as_the_cpu_does, SUBJECTS[0], 4, options={"nodes": [0, 0, 1, 1]}),
        "nodes-clipped": partial(steps_as_the_cpu_does, SUBJECTS[0], 3, options={"nodes": [0, 0, 1], "max_norm": 1.0}),
    }
)
