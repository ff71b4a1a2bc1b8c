"""A small model of numbered layers, data that differ by rank, a training loop, and what holds of it on every backend:
each body is run on threads, and on real ranks over Gloo and MPI."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from tests.optim.diloco.reference import flat, streaming
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


def outer_weights(model: nn.Module, optimizer: thinwire.DiLoCo) -> Tensor:
    optimizer.eval()
    found = flat(model.parameters()).clone()
    optimizer.train()
    return found


def relative_error(given: Tensor, wanted: Tensor) -> float:
    return float((given.double() - wanted).norm() / wanted.norm())


def follows_the_published_algorithms(
    comm: Communicator, momentum: float = 0.9, fragments: int = 2, overlap: int = 2, mix: float = 0.5
) -> None:
    """Algorithm 2 of Streaming DiLoCo in float64, 5 outer steps of each fragment; Algorithm 1 of DiLoCo with one
    fragment, no overlap and mix 0."""
    model = Tower()
    every = 6 if overlap else 4
    options = {"every": every, "overlap": overlap, "mix": mix, "outer_lr": 0.7}
    optimizer = make(comm, model, torch.optim.AdamW, lr=0.01, fragments=fragments, outer_momentum=momentum, **options)
    starts = [0, *torch.tensor([one.numel() for one in model.parameters()]).cumsum(0).tolist()]
    places = [
        torch.cat([starts[piece.parameter] + piece.start + torch.arange(piece.numel) for piece in one.pieces])
        for one in optimizer._home.fragments
    ]
    assert sum(map(len, places)) == NUMEL
    train(model, optimizer, 1, 5 * every + overlap)
    outer, replicas = streaming(
        Tower(),
        comm.size,
        5 * every + overlap,
        lambda weights: torch.optim.AdamW(weights, lr=0.01),
        loss_of,
        places,
        momentum=momentum,
        **options,
    )
    assert relative_error(outer_weights(model, optimizer), outer) < 1e-6
    assert relative_error(flat(model.parameters()), replicas[comm.rank]) < 1e-6
    optimizer.close()


def outer_weights_agree(comm: Communicator, codec: str = "int4") -> None:
    """The same bits on every rank after many steps; after `synchronize` they are everybody's own."""
    model = Tower()
    optimizer = make(comm, model, torch.optim.AdamW, lr=0.01, every=6, fragments=3, overlap=2, codec=codec)
    train(model, optimizer, 1, 200)
    common = outer_weights(model, optimizer)
    optimizer.synchronize()
    assert optimizer.in_sync
    assert torch.equal(outer_weights(model, optimizer), flat(model.parameters()))
    together = torch.cat([common, flat(model.parameters())])
    everyone = together.new_empty(comm.size * together.numel())
    comm.all_gather(everyone, together)
    assert all(torch.equal(one, together) for one in everyone.view(comm.size, -1))
    optimizer.close()


def _one_outer_step_at_a_time(comm: Communicator) -> None:
    follows_the_published_algorithms(comm, fragments=1, overlap=0, mix=0.0)


ALL = (_one_outer_step_at_a_time, follows_the_published_algorithms, outer_weights_agree)
