"""A frozen step on a GPU: the host waits for it once, and what lies between two waits is captured as a graph."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.optim.subject import dyadic, with_gradients
from tests.optim.training import make_model, weights
from thinwire import OneBitAdam, OneBitLion
from thinwire.comm import Communicator, TorchCommunicator, threads
from thinwire.optim import CapturedStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

STEPS = 10
FROZEN = 6  # a step that is frozen, with everything compiled


@pytest.fixture
def comm() -> Iterator[Communicator]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    comm = TorchCommunicator()
    try:
        yield comm
    finally:
        comm.close()
        dist.destroy_process_group()


def waits_of(work: Callable[[], object]) -> int:
    """How often torch waits for the device in `work()`."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in caught)


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_frozen_step_waits_once(comm, stage, max_norm) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.GELU(), nn.Linear(300, 64)).cuda()
    optimizer = OneBitAdam(
        model.parameters(), freeze_step=3, comm=comm, stage=stage, max_norm=max_norm, bucket_bytes=30_000
    )
    inputs = torch.randn(32, 64, device="cuda")

    def train() -> None:
        optimizer.zero_grad()
        (
            model(inputs) - inputs
        ).square().mean().backward()  # stage 0 waits at its end, for GradScalers to see overflows
        optimizer.step()

    for step in range(STEPS):
        assert waits_of(train) <= 1 or step < FROZEN
    assert optimizer.frozen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captured_steps_have_the_bits_of_eager_ones(comm, dtype) -> None:
    steps, skipped = 30, 15

    def train(captures: bool) -> tuple[Tensor, int, int]:
        model = make_model(dtype=dtype).cuda()
        optimizer = OneBitAdam(model.parameters(), freeze_step=3, comm=comm, block_size=64, bucket_bytes=1000)

        def work(*gradients: Tensor) -> Tensor:
            loss = with_gradients(model, list(gradients))
            loss.backward()
            return loss.detach()

        step = CapturedStep(optimizer, work)
        for number in range(steps):
            gradients = [one.cuda() for one in dyadic(model, 0, number)]
            if number == skipped:
                gradients[0].fill_(torch.inf)
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + number % 5)
            if captures:
                step(*gradients)
            else:
                optimizer.zero_grad()
                work(*gradients)
                optimizer.step()
        return weights(model).cpu(), optimizer.skipped_steps, step.replays

    found, skips, replays = train(True)
    expected, *_ = train(False)
    assert torch.equal(found, expected)
    assert skips == 1
    assert replays == steps - 3 - 3 - 2  # the warmup, frozen steps that warm up, and a capture of either turn


def test_captured_training_follows_eager_training(comm) -> None:
    """Of a model, whose backward lets memory go that later launches of a graph use again."""

    def train(captures: bool) -> list[float]:
        torch.manual_seed(0)
        layers = (nn.Linear(64, 300), nn.GELU(), nn.LayerNorm(300), nn.Linear(300, 300), nn.GELU(), nn.Linear(300, 64))
        model = nn.Sequential(*layers).cuda()
        optimizer = OneBitAdam(model.parameters(), freeze_step=10, comm=comm, bucket_bytes=100_000)

        def work(inputs: Tensor) -> Tensor:
            loss = (model(inputs) - inputs.sin()).square().mean()
            loss.backward()
            return loss.detach()

        step, losses = CapturedStep(optimizer, work), []
        for _ in range(40):
            inputs = torch.randn(32, 64, device="cuda")
            if captures:
                losses.append(step(inputs).item())
            else:
                optimizer.zero_grad()
                losses.append(work(inputs).item())
                optimizer.step()
        assert step.replays == (40 - 10 - 3 - 2 if captures else 0)
        return losses

    assert train(True) == pytest.approx(train(False), rel=1e-3)


def test_ranks_as_threads_do_not_wait_for_each_others_hooks() -> None:
    """torch runs one device's backwards on one thread, unless told otherwise."""

    def body(comm: Communicator) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(50, 20).cuda()
        optimizer = OneBitLion(model.parameters(), comm=comm)
        for step in range(5):
            optimizer.zero_grad()
            inputs = torch.full((3, 50), 0.1 * (comm.rank + step), device="cuda")
            model(inputs).square().mean().backward()
            optimizer.step()
        return model.weight.detach().cpu()

    found = threads.run(body, 4, timeout=30)
    assert all(torch.equal(one, found[0]) for one in found)
