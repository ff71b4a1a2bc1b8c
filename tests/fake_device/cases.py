"""Cases on the fake device: ranks as threads that train on it, whose backwards torch runs on one thread unless told
otherwise; what a step costs besides its kernels, in waits of the host and launches; and steps that are captured and
replayed, on an emulated GPU whose graphs are recorded launches.

As a program it runs the cases that are named, in a process of their own, and prints what became of each; or one rank of
a job: `rank NAME DEVICE BACKEND`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from tests.fake_device import NAME, Counts, counting, load
from tests.fake_device.graphs import on_an_emulated_gpu
from tests.optim.subject import FREEZE, SUBJECTS, Subject
from tests.optim.training import batch, make_model, weights
from thinwire import comm as communication
from thinwire.comm import Communicator, threads
from thinwire.optim.captured_step import CapturedStep
from thinwire.zero import ShardedOptimizer
from thinwire.zero.memory import live_tensor_bytes

TRAINED = 12  # the warmup, and frozen steps of every kind


def train(
    subject: Subject | Rounded, device: str, dtype: torch.dtype, options: dict[str, Any], comm: Communicator
) -> Tensor:
    model = make_model(dtype=dtype).to(device)
    optimizer = subject.build(model, comm, **options)
    for step in range(TRAINED):
        inputs, wanted = (one.to(device) for one in batch(comm.rank, step, dtype))
        optimizer.zero_grad()
        (model(inputs) - wanted).square().mean().backward()
        optimizer.step()
    optimizer.eval()
    if isinstance(subject, Rounded):  # only CPUs keep what gradients gather in
        optimizer.zero_grad()
        found = live_tensor_bytes(model, optimizer).items()
        held = sum(one for (kind, where), one in found if kind == "gradients" and where.startswith(device))
        assert held - optimizer.model_state_bytes()["gradients"] < 256
        payload = sum(4 * one.layout.padded_numel for one in optimizer._home.gradients)
        assert (held < payload) == (device != "cpu" and subject.stage > 0)
    return weights(model).cpu()


def steps_as_the_cpu_does(
    subject: Subject | Rounded, ranks: int, dtype: torch.dtype = torch.float32, options: dict[str, Any] | None = None
) -> None:
    """The same bits as on the CPU, whose kernels the device has."""
    found = threads.run(partial(train, subject, NAME, dtype, options or {}), ranks, timeout=60)
    expected = threads.run(partial(train, subject, "cpu", dtype, options or {}), ranks)
    for rank in range(ranks):
        assert torch.equal(found[rank], expected[rank]), f"rank {rank}"


@dataclass(frozen=True)
class Rounded:
    """ShardedOptimizer through a codec at one stage, or 1-bit Muon, built as subjects are."""

    stage: int
    muon: bool = False

    def build(self, model: nn.Module, comm: Communicator, **options: Any) -> ShardedOptimizer:
        options |= {"stage": self.stage, "comm": comm, "block_size": 64, "lr": 1e-2}
        if self.muon:
            return thinwire.OneBitMuon(model.named_parameters(), codec=("stat2", "sign1"), ns_dtype="fp32", **options)
        return ShardedOptimizer(model.parameters(), torch.optim.AdamW, codec="int4", **options)


OFFLOADED = {"offload": True, "pin_memory": True}


# What a step costs

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


# Captured steps

CAPTURED = FREEZE + 33
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


def run_captured(comm: Communicator, captures: bool, dtype: torch.dtype) -> Run:
    model = make_model(dtype=dtype).to(NAME)
    optimizer = SUBJECTS[0].build(model, comm, resync_interval=4)

    def work(inputs: Tensor, wanted: Tensor) -> Tensor:
        loss = (model(inputs) - wanted).square().mean()
        loss.backward()
        return loss.detach()

    step = CapturedStep(optimizer, work)
    losses: list[float] = []
    for number in range(CAPTURED):
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
        found = threads.run(partial(run_captured, captures=True, dtype=dtype), ranks)
        expected = threads.run(partial(run_captured, captures=False, dtype=dtype), ranks)
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
    | {f"{subject}-waits": partial(waits_once_a_step, subject) for subject in SUBJECTS}
    | {f"{subject}-waits-clipped": partial(waits_once_a_step, subject, max_norm=1.0) for subject in SUBJECTS}
    | {f"{one}-waits-offloaded": partial(waits_once_a_step, one, **OFFLOADED) for one in SUBJECTS if one.packs}
    | {
        # Leg 2 has to pass on what only some ranks of a node have heard.
        "nodes": partial(steps_as_the_cpu_does, SUBJECTS[0], 4, options={"nodes": [0, 0, 1, 1]}),
        "nodes-clipped": partial(steps_as_the_cpu_does, SUBJECTS[0], 3, options={"nodes": [0, 0, 1], "max_norm": 1.0}),
        "nodes-waits": partial(waits_once_a_step, SUBJECTS[0], nodes=[0, 0]),
        "rounded-0": partial(steps_as_the_cpu_does, Rounded(0), 3),
        "rounded-1": partial(steps_as_the_cpu_does, Rounded(1), 3),
        "rounded-1-nodes": partial(steps_as_the_cpu_does, Rounded(1), 4, options={"nodes": [0, 0, 1, 1]}),
        "rounded-muon": partial(steps_as_the_cpu_does, Rounded(1, muon=True), 3, options={"max_norm": 0.5}),
        "rounded-2-offloaded": partial(steps_as_the_cpu_does, Rounded(2), 2, torch.bfloat16, OFFLOADED),
        "edits": edits_of_gradients_are_noticed,
        "launches": launches_few_kernels_a_bucket,
        "captured-2-ranks": partial(replays_have_the_bits_of_eager_steps, 2, torch.float32),
        "captured-counts": replays_copy_and_wait_once,
        "captured-bf16": partial(replays_have_the_bits_of_eager_steps, 1, torch.bfloat16),
    }
)


def run_rank(name: str, device: str, backend: str) -> None:
    """One rank of a job with tensors on one device, "fake" or "cuda"; several may share it. Rank 0 prints that all hold
    the same weights."""
    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")))
        torch.cuda.set_device(local % torch.cuda.device_count())
        comm = communication.init(backend=backend)
    else:
        load()
        dist.init_process_group(f"cpu:{backend},{device}:{backend}")
        comm = communication.TorchCommunicator()
    subject = next(one for one in SUBJECTS if str(one) == name)
    mine = train(subject, device, torch.float32, {}, comm)
    everyone = mine.new_empty(comm.size * mine.numel())
    comm.all_gather(everyone, mine)
    assert all(torch.equal(one, mine) for one in everyone.view(comm.size, -1)), "ranks hold different weights"
    if comm.rank == 0:
        print(f"{comm.size} ranks agree over {comm.backend}", flush=True)
    comm.close()
    if device != "cuda":
        dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] == "rank":
        run_rank(*sys.argv[2:])
        return
    load()
    for name in sys.argv[1:]:
        try:
            CASES[name]()
        except Exception:
            print(json.dumps([name, traceback.format_exc()]), flush=True)
        else:
            print(json.dumps([name, None]), flush=True)


if __name__ == "__main__":
    main()
