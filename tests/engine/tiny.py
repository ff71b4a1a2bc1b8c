"""A tiny model of repeated layers, data that differ by rank and step, and training loops on the engine and in plain
torch: what the engine's tests share."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire import initialize
from thinwire.comm import Communicator, threads
from thinwire.engine import Engine

MICRO = 6
FEATURES = 16
HIDDEN = 130  # several of the blocks that shards are whole numbers of
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, FEATURES)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.tanh(self.up(inputs)))


class Tiny(nn.Module):
    """With a tied, a frozen, an empty and an unused parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(FEATURES, FEATURES, bias=False)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.unmix = nn.Linear(FEATURES, FEATURES)
        self.unmix.weight = self.mix.weight
        self.frozen = nn.Parameter(torch.zeros(FEATURES), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.zeros(4))
        self.register_buffer("calls", torch.zeros(1))
        self.calls: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.mix(inputs) + self.frozen
        for layer in self.layers:
            hidden = layer(hidden)
        return self.unmix(hidden) + self.nothing.sum()


def make_model(seed: int = 0) -> Tiny:
    model = Tiny()
    generator = torch.Generator().manual_seed(seed)  # not the global one, which ranks on threads share
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2, generator=generator)
    return model


def batch(rank: int, micro_step: int, size: int = MICRO) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * rank + micro_step)
    inputs = torch.randn(size, FEATURES, generator=generator)
    noise = torch.randn(size, FEATURES, generator=generator)
    return inputs, inputs.flip(1).sin() + 0.3 * noise


def loss_of(model: Callable[..., Tensor], rank: int, micro_step: int) -> Tensor:
    inputs, wanted = batch(rank, micro_step)
    return (model(inputs).float() - wanted).square().mean()


def settings(stage: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 6000} if stage < 3 else {"stage": 3},
    } | changes


def make_engine(comm: Communicator | None, config: dict[str, Any], seed: int = 0, **given: Any) -> Engine:
    return initialize(**{"model": make_model(seed), "comm": comm, "config": config, **given})[0]


def train(engine: Engine, steps: Iterable[int]) -> list[float]:
    """Train on this rank's batches of `steps`; the mean losses of each step, over micro-batches and ranks."""
    losses = []
    for step in steps:
        total = torch.zeros(1)
        for micro in range(engine.gradient_accumulation_steps()):
            loss = loss_of(engine, engine.comm.rank, step * engine.gradient_accumulation_steps() + micro)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / engine.gradient_accumulation_steps()
        engine.comm.all_reduce(total, op="mean")
        losses.append(float(total))
    return losses


def train_same_data(engine: Engine, steps: Iterable[int]) -> list[float]:
    """Losses of steps in which all ranks take the same data, whose average does not depend on their number."""
    losses = []
    for step in steps:
        loss = loss_of(engine, 0, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all but the number of calls."""
    return {name: value.clone() for name, value in model.state_dict().items() if name != "calls"}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two states have the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def at_stages(body: Callable[[Communicator, int], Any], *stages: int, ranks: int = 2) -> list[list[Any]]:
    """Run a body, which takes a stage, on ranks of its own at each stage, by default all below 3."""
    return [threads.run(lambda comm, stage=stage: body(comm, stage), ranks) for stage in stages or (0, 1, 2)]


def speaking() -> Communicator:
    """One rank, as in a job that prints what it has to say."""
    comm = threads.single(60.0)
    comm.speaks = True
    return comm


def reference(
    world: int, steps: int, accumulation: int = 1, max_norm: float = 0.0, kind: type[Optimizer] = torch.optim.AdamW
) -> list[float]:
    """The same losses, of one process in plain torch."""
    model = make_model()
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(steps):
        total = 0.0
        for rank in range(world):
            for micro in range(accumulation):
                loss = loss_of(model, rank, step * accumulation + micro) / (world * accumulation)
                loss.backward()
                total += loss.item()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
