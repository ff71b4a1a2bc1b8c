"""What one rank of torchrun does: layers dropped under DistributedDataParallel, which is told nothing of it."""

from __future__ import annotations

import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.pld.models import batch, make_stack
from thinwire import comm
from thinwire.comm import Communicator
from thinwire.pld import ProgressiveLayerDrop, drop_layers


def check_plain(world: Communicator, wrap_first: bool, accumulation: int) -> None:
    """The averaged gradients are those of one process with all ranks' batches; zero for what was dropped."""
    inner, alone = make_stack(), make_stack()
    model = DistributedDataParallel(inner, bucket_cap_mb=0.001)
    schedules = [ProgressiveLayerDrop(0.3, 1.0) for _ in range(2)]
    handle = drop_layers(model if wrap_first else inner, schedules[0], seed=4)
    drop_layers(alone, schedules[1], seed=4)
    some_dropped = False
    for step in range(12):
        for schedule in schedules:
            schedule.update_state(step)
        model.zero_grad()
        alone.zero_grad()
        for micro in range(accumulation):
            last = micro == accumulation - 1
            model.require_backward_grad_sync = last
            model(batch(world.rank, step, micro)).square().mean().backward()
            whole = torch.cat([batch(rank, step, micro) for rank in range(world.size)])
            alone(whole).square().mean().backward()
        dropped = handle.dropped_parameters()
        some_dropped |= bool(dropped)
        assert not any(bool(parameter.grad.any()) for parameter in dropped)
        for mine, expected in zip(inner.parameters(), alone.parameters(), strict=True):
            wanted = torch.zeros_like(mine) if expected.grad is None else expected.grad
            torch.testing.assert_close(mine.grad, wanted, rtol=1e-4, atol=1e-6)
    assert some_dropped


def check_attached_onebit(world: Communicator) -> None:
    """OneBitAdam beside DDP, 40 steps through the freeze: the same weights everywhere."""
    inner = make_stack()
    model = DistributedDataParallel(inner)
    optimizer = thinwire.OneBitAdam(model.parameters(), lr=3e-3, freeze_step=10, block_size=64, comm=world)
    optimizer.attach(model)
    schedule = ProgressiveLayerDrop(0.3, 1.0)
    drop_layers(inner, schedule)
    for step in range(40):
        schedule.update_state(step)
        optimizer.zero_grad()
        model(batch(world.rank, step)).square().mean().backward()
        optimizer.step()
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in inner.parameters()])
    assert len(set(world.all_gather_bytes(flat.numpy().tobytes()))) == 1


if __name__ == "__main__":
    world = comm.init(timeout=60.0)
    for wrap_first in (False, True):
        for accumulation in (1, 3):
            check_plain(world, wrap_first, accumulation)
    check_attached_onebit(world)
    if world.rank == 0:
        sys.stdout.write("all held\n")
