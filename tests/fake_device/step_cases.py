"""What a step costs on a device besides its kernels: moments at which the host waits, and launches."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fake_device import NAME, Counts, counting
from tests.fake_device.buckets import on_an_emulated_gpu
from tests.optim.subject import FREEZE, SUBJECTS, Subject
from tests.optim.training import batch, make_model
from thinwire.comm import Communicator, threads

RANKS = 2
STEPS = FREEZE + 10  # beyond the freeze, and a sync of those with local steps

WAITS = {"OneBitLamb": 2}
"""A step waits once, for the headers; LAMB's also for its norms, which Python's floats become coefficients of."""

LAUNCHES = 12
"""Of a frozen step of one bucket, of however many parameters, Adam's at stage 0, forward and backward apart. Six are
not the bucket's: four copies that stand for two collectives, and two by which the host hears of all buckets. The
bucket's: three kernels over the whole bucket, the header of leg 2, a copy of leg 1's, and the gradients' seal. Each of
the tables of runs is one more where it has changed: gradients that lie elsewhere, another rate."""


class Counted:
    """Counts what the ranks do between two meetings of theirs, all of them together."""

    def __init__(self) -> None:
        self._meeting = threading.Barrier(RANKS)

    def __call__(self, comm: Communicator, work: Callable[[], object]) -> Counts:
        self._meeting.wait()
        if comm.rank:
            self._meeting.wait()
            work()
            self._meeting.wait()
            self._meeting.wait()
            return Counts()
        with counting() as counts:
            self._meeting.wait()
            work()
            self._meeting.wait()
        self._meeting.wait()  # nobody does more before it is read
        return counts


def waits_once_a_step(subject: Subject, **options: Any) -> None:
    counted = Counted()
    limit = WAITS.get(subject.name, 1)

    def body(comm: Communicator) -> None:
        model = make_model().to(NAME)
        optimizer = subject.build(model, comm, **options)
        for step in range(STEPS):
            inputs, wanted = (one.to(NAME) for one in batch(comm.rank, step))
            optimizer.zero_grad()
            loss = (model(inputs) - wanted).square().mean()

            def work(loss: Tensor = loss) -> None:
                loss.backward()
                optimizer.step()

            waits = counted(comm, work).waits
            if step > FREEZE:
                assert waits.total() <= limit * RANKS, f"step {step}: {dict(waits)}"
        assert optimizer.frozen

    threads.run(body, RANKS, timeout=20)


def launches_few_kernels_a_bucket() -> None:
    counted = Counted()

    def body(comm: Communicator) -> list[Counter[str]]:
        launches = []
        model = nn.Sequential(nn.Linear(20, 40), nn.LayerNorm(40), nn.Linear(40, 20), nn.Linear(20, 3)).to(NAME)
        optimizer = SUBJECTS[0].build(model, comm, bucket_bytes=1 << 20, bias_correction=False)
        generator = torch.Generator().manual_seed(comm.rank)
        for one in model.parameters():
            one.grad = torch.zeros_like(one)
        for step in range(STEPS):
            for one in model.parameters():
                one.grad.copy_(torch.randn(one.shape, generator=generator))
            if step == STEPS - 1:
                optimizer.param_groups[0]["lr"] *= 0.5
            launches.append(counted(comm, optimizer.step).launches)
        return launches

    with on_an_emulated_gpu():
        *_, steady, with_another_rate = threads.run(body, RANKS)[0]
    assert steady.total() <= LAUNCHES * RANKS, dict(steady)
    assert "copy to device" not in steady, dict(steady)
    assert with_another_rate - steady == Counter({"copy to device": RANKS})


def edits_of_gradients_are_noticed() -> None:
    """One that writes the values that are there already is none."""

    def body(comm: Communicator) -> None:
        model = make_model().to(NAME)
        optimizer = SUBJECTS[0].build(model, comm)
        for step in range(2 * FREEZE):
            inputs, wanted = (one.to(NAME) for one in batch(comm.rank, step))
            optimizer.zero_grad()
            (model(inputs) - wanted).square().mean().backward()
            model[2].weight.grad.mul_(1.0)
            if step % FREEZE == FREEZE - 2:
                model[2].bias.grad[3] *= 1.0625
                with pytest.raises(RuntimeError, match="was changed or dropped between backward"):
                    optimizer.step()
                continue
            optimizer.step()
        assert optimizer.frozen

    threads.run(body, 1)


CASES: dict[str, Callable[[], None]] = (
    {f"{subject}-waits": partial(waits_once_a_step, subject) for subject in SUBJECTS}
    | {f"{subject}-waits-clipped": partial(waits_once_a_step, subject, max_norm=1.0) for subject in SUBJECTS}
    | {
        f"{subject}-waits-offloaded": partial(waits_once_a_step, subject, offload=True, pin_memory=True)
        for subject in SUBJECTS
        if subject.packs
    }
    | {
        "nodes-waits": partial(waits_once_a_step, SUBJECTS[0], nodes=[0, 0]),
        "edits": edits_of_gradients_are_noticed,
        "launches": launches_few_kernels_a_bucket,
    }
)
