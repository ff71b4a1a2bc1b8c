"""What one rank of torchrun does: layers dropped under DistributedDataParallel, which is told nothing of it.

Takes the steps that 1-bit Adam makes beside it: `torchrun --nproc-per-node=2 -m tests.pld.ddp_program 500`.
"""

from __future__ import annotations

import copy
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
    for step in range(8):
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


class Job:
    """OneBitAdam beside DDP, over a stack whose layers are dropped and left out."""

    def __init__(self, world: Communicator) -> None:
        self.inner = make_stack()
        self.rank = world.rank
        self.model = DistributedDataParallel(self.inner)
        self.optimizer = thinwire.OneBitAdam(
            self.model.parameters(), lr=3e-3, freeze_step=15, block_size=64, bucket_bytes=2000, comm=world
        )
        self.optimizer.attach(self.model)
        self.schedule = ProgressiveLayerDrop(0.3, 0.1)
        self.drop = drop_layers(self.inner, self.schedule, seed=7)
        self.masks = b""

    def train(self, steps: range) -> None:
        for step in steps:
            self.schedule.update_state(step)
            self.optimizer.zero_grad()
            loss = self.model(batch(self.rank, step)).square().mean()
            dropped = self.drop.dropped_parameters()
            self.optimizer.leave_out(dropped)
            loss.backward()
            self.optimizer.step()
            gone = {id(parameter) for parameter in dropped}
            self.masks += bytes(id(layer.up.weight) in gone for layer in self.inner.layers)

    def resume(self, other: Job) -> None:
        for mine, theirs in ((self.inner, other.inner), (self.optimizer, other.optimizer), (self.drop, other.drop)):
            mine.load_state_dict(copy.deepcopy(theirs.state_dict()))

    @property
    def weights(self) -> bytes:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.inner.parameters()]).numpy().tobytes()


def check_attached_onebit(world: Communicator, steps: int) -> None:
    """Through the freeze and a resume: the same masks and weights on every rank, and as without the stop."""
    whole, second = Job(world), Job(world)
    stop = steps * 46 // 100
    whole.train(range(stop))
    second.resume(whole)
    before = whole.masks
    whole.train(range(stop, steps))
    second.train(range(stop, steps))
    assert before + second.masks == whole.masks
    assert 0.2 < sum(whole.masks) / len(whole.masks) < 0.6
    assert second.weights == whole.weights
    assert len(set(world.all_gather_bytes(whole.weights + whole.masks))) == 1


if __name__ == "__main__":
    world = comm.init(timeout=60.0)
    check_plain(world, wrap_first=False, accumulation=3)
    check_plain(world, wrap_first=True, accumulation=1)
    check_attached_onebit(world, int(sys.argv[1]))
    if world.rank == 0:
        sys.stdout.write("all held\n")
