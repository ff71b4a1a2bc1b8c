"""A small model, data that differ by rank, and a training loop: what the optimizer's tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import thinwire
from thinwire.comm import Communicator


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 37), nn.Tanh(), nn.Linear(37, 11), nn.Tanh(), nn.Linear(11, 1))
    generator = torch.Generator().manual_seed(seed)  # not the global one, which ranks on threads would share
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model.to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(16, 6, generator=generator)
    return inputs.to(dtype), inputs.sum(dim=1, keepdim=True).tanh().to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    inputs, wanted = batch(rank, step, dtype)
    return (model(inputs) - wanted).square().mean()


def make_optimizer(model: nn.Module, comm: Communicator, **options) -> thinwire.OneBitAdam:
    options = {"lr": 3e-3, "freeze_step": 10, "block_size": 64} | options
    return thinwire.OneBitAdam(model.parameters(), comm=comm, **options)


def train(
    model: nn.Module,
    optimizer: thinwire.OneBitAdam,
    steps: Iterable[int],
    after_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Train on this rank's batches of `steps`; the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, optimizer.comm.rank, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after_step(step)
    return losses


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().float().reshape(-1) for parameter in model.parameters()])
