"""Somebody's optimizers, sharded and in one process that sees all ranks' data."""

import torch
from torch import Tensor, nn

from tests.optim.training import loss_of, make_model, weights
from thinwire.comm import Communicator
from thinwire.zero import ShardedOptimizer

ADAMW = {"optimizer_class": torch.optim.AdamW, "lr": 3e-3, "weight_decay": 0.1}
SGD = {"optimizer_class": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}


class Momentum(torch.optim.Optimizer):
    """Somebody else's elementwise optimizer."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for one in (one for one in group["params"] if one.grad is not None):
                momentum = self.state[one].setdefault("exp_avg", torch.zeros_like(one))
                one.sub_(momentum.lerp_(one.grad, 0.1), alpha=group["lr"])


MOMENTUM = {"optimizer_class": Momentum, "lr": 0.1}


def build(comm: Communicator, model: nn.Module, stage: int, **options) -> ShardedOptimizer:
    options = {"bucket_bytes": 1000, "block_size": 8} | (options or ADAMW)
    return ShardedOptimizer(
        model.parameters(), stage=stage, comm=comm, named_parameters=model.named_parameters(), **options
    )


def train(optimizer, model: nn.Module, steps, accumulation: int = 1, scale: float = 1.0) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        total = 0.0
        for micro in range(accumulation):
            loss = loss_of(model, optimizer.comm.rank, step * accumulation + micro) / accumulation
            if micro < accumulation - 1:
                with optimizer.no_sync():
                    (scale * loss).backward()
                    optimizer.end_backward()
            else:
                (scale * loss).backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def by_one_process(ranks: int, steps: int, accumulation: int = 1, max_norm: float = 0.0, **options) -> Tensor:
    model = make_model()
    optimizer_class = options.pop("optimizer_class")
    optimizer = optimizer_class(model.parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            for micro in range(accumulation):
                (loss_of(model, rank, step * accumulation + micro) / (ranks * accumulation)).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return weights(model)
