"""A small model of numbered layers, data that differ by rank, and a training loop."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from tests.optim.diloco.reference import flat
from thinwire.comm import Communicator


class Tower(nn.Module):
    """Four numbered layers between what lies in no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.last = nn.Linear(7, 1)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.4, generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = layer(hidden.tanh())
        return self.last(hidden)


NUMEL = sum(parameter.numel() for parameter in Tower().parameters())


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(16, 5, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)
    return (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()


def make(comm: Communicator, model: nn.Module, inner: Any = torch.optim.SGD, **options: Any) -> thinwire.DiLoCo:
    options = {"lr": 0.05, "every": 4, "codec": "none", "block_size": 64} | options
    return thinwire.DiLoCo(model.named_parameters(), inner, comm=comm, **options)


def train(model: nn.Module, optimizer: thinwire.DiLoCo, first: int, last: int) -> None:
    for step in range(first, last + 1):
        optimizer.zero_grad()
        loss_of(model, optimizer.comm.rank, step).backward()
        optimizer.step()


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def outer_weights(model: nn.Module, optimizer: thinwire.DiLoCo) -> Tensor:
    optimizer.eval()
    found = flat(model.parameters()).clone()
    optimizer.train()
    return found
