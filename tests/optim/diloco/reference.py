"""DiLoCo's Algorithm 1 and Streaming DiLoCo's Algorithm 2 in float64, all workers in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All of them end to end."""
    return torch.cat([one.detach().reshape(-1) for one in tensors])


def streaming(
    model: nn.Module,
    workers: int,
    steps: int,
    make_inner: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    loss_of: Callable[[nn.Module, int, int], Tensor],
    fragments: Sequence[Tensor],
    *,
    every: int,
    overlap: int,
    mix: float,
    outer_lr: float,
    momentum: float,
) -> tuple[Tensor, list[Tensor]]:
    """The outer weights, and each worker's own, flat, after `steps`; `fragments`: places in the flat weights.

    Algorithm 2; with one fragment, no overlap and mix 0, Algorithm 1. The outer optimizer is torch's own SGD.
    """
    replicas = [copy.deepcopy(model).double() for _ in range(workers)]
    inner = [make_inner(list(one.parameters())) for one in replicas]
    outer = [flat(replicas[0].parameters())[places].requires_grad_() for places in fragments]
    optimizers = [torch.optim.SGD([one], lr=outer_lr, momentum=momentum, nesterov=momentum > 0) for one in outer]
    arriving: dict[tuple[int, int], Tensor] = {}
    for step in range(1, steps + 1):
        for worker, (replica, optimizer) in enumerate(zip(replicas, inner, strict=True)):
            optimizer.zero_grad()
            loss_of(replica, worker, step).backward()
            optimizer.step()
        own = torch.stack([flat(replica.parameters()) for replica in replicas])
        for number, places in enumerate(fragments):
            if (step - -(-(number + 1) * every // len(fragments))) % every == 0:
                arriving[number, step + overlap] = outer[number].detach() - own[:, places].mean(0)
            if (gradient := arriving.pop((number, step), None)) is not None:
                outer[number].grad = gradient
                optimizers[number].step()
                own[:, places] = mix * own[:, places] + (1 - mix) * outer[number].detach()
        for replica, weights in zip(replicas, own, strict=True):
            torch.nn.utils.vector_to_parameters(weights, replica.parameters())
    common = torch.empty_like(own[0])
    for weights, places in zip(outer, fragments, strict=True):
        common[places] = weights.detach()
    return common, list(own)


def algorithm_1(
    model: nn.Module,
    rounds: Sequence[Mapping[int, Sequence[int]]],
    loss_of: Callable[[nn.Module, int, int], Tensor],
    *,
    every: int,
    outer_lr: float,
    momentum: float,
) -> Tensor:
    """The outer weights of Algorithm 1 by AdamW workers that differ from round to round, flat; `rounds`: by worker that
    is present, of whose data it averages the gradients."""
    model = model.double()
    outer = flat(model.parameters())
    velocity = torch.zeros_like(outer)
    workers: dict[int, tuple[nn.Module, torch.optim.Optimizer]] = {}
    for number, present in enumerate(rounds):
        for worker, data in present.items():
            if worker not in workers:
                own = copy.deepcopy(model)
                workers[worker] = own, torch.optim.AdamW(own.parameters(), lr=0.01)
            own, inner = workers[worker]
            torch.nn.utils.vector_to_parameters(outer.clone(), own.parameters())
            for at in range(number * every, (number + 1) * every):
                inner.zero_grad()
                torch.stack([loss_of(own, one, at + 1) for one in data]).mean().backward()
                inner.step()
        gradient = torch.stack([outer - flat(workers[worker][0].parameters()) for worker in present]).mean(0)
        velocity = momentum * velocity + gradient
        outer = outer - outer_lr * (gradient + momentum * velocity)
    return outer
