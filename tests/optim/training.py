"""A small model, data that differ by rank, and a training loop: what the optimizer's tests share."""

import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from thinwire.comm import Communicator
from thinwire.optim.bucket import Bucket
from thinwire.zero.backward import BackwardWatcher
from thinwire.zero.home import TRAFFIC


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


def exchange_comm(optimizer: Any) -> Communicator:
    """The communicator that steps are sent over."""
    home = optimizer._home
    return home._parameters.exchange_comm if home.kind == "sharded" else home._exchange_comm


def calls_made(optimizer: Any) -> int:
    """The collectives of its steps so far, by node too."""
    home = optimizer._home
    links = home._parameters.links if home.kind == "sharded" else home._links
    by_node = [] if links is None else [links.inside, links.between]
    return sum(one.traffic.calls for one in (exchange_comm(optimizer), *by_node))


def watcher(optimizer: Any) -> BackwardWatcher:
    """What watches its backwards."""
    return optimizer._home.watcher


def buckets_of(optimizer: Any) -> list[Bucket]:
    """The buckets of an optimizer at stage 0, once they are laid out."""
    return [bucket for group in optimizer._home.groups for bucket in group.buckets]


def snapshot(model: nn.Module, optimizer: Any) -> tuple[dict[Any, Tensor], dict[str, Any]]:
    """All that a skipped step must leave as it was: weights, state, residuals and counters; not the bytes it sent."""
    tensors: dict[Any, Tensor] = {("shown",): weights(model).clone()}
    for saved_slice in optimizer.saved_slices():
        tensors[saved_slice.kind, saved_slice.name, saved_slice.start] = saved_slice.tensor.detach().clone()
    for key, tensor in optimizer.rank_tensors().items():
        if key != TRAFFIC:
            tensors["rank", key] = tensor.detach().clone()
    counters = optimizer.counters()
    counters.pop("skipped_steps")
    return tensors, counters


def same(left: tuple[dict[Any, Tensor], dict[str, Any]], right: tuple[dict[Any, Tensor], dict[str, Any]]) -> bool:
    """Whether two snapshots hold the same bits."""
    return (
        left[0].keys() == right[0].keys()
        and all(torch.equal(tensor, right[0][key]) for key, tensor in left[0].items())
        and left[1] == right[1]
    )


def through_a_file(state: Any) -> Any:
    """Saved and loaded as users do, without pickles of code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
