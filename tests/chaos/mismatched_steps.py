"""Ways in which one rank may train otherwise than the others do, once or from then on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.optim.training import loss_of, make_model


@dataclass
class Training:
    """One rank's. `saved`: its own state dicts by step; `foreign`: one of another optimizer."""

    model: nn.Sequential
    optimizer: Any
    source: random.Random
    foreign: dict[str, Any]
    saved: dict[int, dict[str, Any]] = field(default_factory=dict)

    def backward(self, step: int) -> None:
        loss_of(self.model, self.optimizer.comm.rank, step).backward()

    def backward_that_adds_up(self, step: int) -> None:
        with self.optimizer.no_sync():
            self.backward(step)

    def iterate(self, step: int) -> None:
        """One step as it should be."""
        self.optimizer.zero_grad()
        self.backward(step)
        self.optimizer.step()

    def set(self, name: str, change: Callable[[Any], Any]) -> None:
        group = self.optimizer.param_groups[0]
        if name in group:
            group[name] = change(group[name])

    @property
    def parameter(self) -> Tensor:
        """Any."""
        return self.source.choice(list(self.model.parameters()))

    @torch.no_grad()
    def write(self) -> None:
        parameter = self.parameter
        parameter[(0,) * parameter.dim()] += self.source.choice((1e-6, 0.1, 3.0))

    def replace_data(self, change: Callable[[Tensor], Tensor]) -> None:
        parameter = self.parameter
        parameter.data = change(parameter.data)

    def leave_out_the_last(self) -> None:
        self.optimizer.leave_out(self.model[4].parameters())
        self.model[2](self.model[0](torch.ones(4, 6))).square().sum().backward()


StepKind = Callable[[Training, int], object]
"""Does one rank's iteration of that number."""


def before(change: Callable[[Training], object]) -> StepKind:
    """Something else before a step as it should be."""
    return lambda one, step: (change(one), one.iterate(step))


def between(gradients: Callable[[Training, int], object]) -> StepKind:
    """Something else in place of the backward."""
    return lambda one, step: (one.optimizer.zero_grad(), gradients(one, step), one.optimizer.step())


STEP_KINDS: dict[str, StepKind] = {
    "rate changed": before(lambda one: one.set("lr", lambda lr: lr * one.source.choice((0.0, 0.5, 1.001, 7.0)))),
    "betas changed": before(lambda one: one.set("betas", lambda betas: (one.source.uniform(0.1, 0.8), betas[1]))),
    "decay changed": before(lambda one: one.set("weight_decay", lambda _: one.source.uniform(1e-4, 0.3))),
    "eps changed": before(lambda one: one.set("eps", lambda _: 10 ** one.source.uniform(-7, -2))),
    "loss scale changed": before(lambda one: setattr(one.optimizer, "loss_scale", 64.0)),
    "two backwards": between(lambda one, step: (one.backward(step), one.backward(step + 100))),
    "two backwards that add up": between(lambda one, step: (one.backward_that_adds_up(step), one.backward(step + 100))),
    "only backwards that add up": between(Training.backward_that_adds_up),
    "no backward": between(lambda one, step: None),
    "half a backward": between(lambda one, step: one.model[0](torch.ones(4, 6)).square().sum().backward()),
    "no step": lambda one, step: (one.optimizer.zero_grad(), one.backward(step)),
    "two steps": lambda one, step: (one.iterate(step), one.optimizer.step()),
    "an iteration less": lambda one, step: None,
    "an iteration more": lambda one, step: (one.iterate(step), one.iterate(step)),
    "gradients dropped": between(lambda one, step: (one.backward(step), one.optimizer.zero_grad())),
    "weights changed": before(Training.write),
    "weights changed after backward": between(lambda one, step: (one.backward(step), one.write())),
    "data replaced": before(lambda one: one.replace_data(torch.clone)),
    "data replaced by others": before(lambda one: one.replace_data(lambda data: data + 0.01)),
    "data of another dtype": before(lambda one: one.model.double().float()),
    "another model loaded": before(lambda one: one.model.load_state_dict(make_model(seed=3).state_dict())),
    "left out": between(lambda one, step: one.leave_out_the_last()),
    "own state loaded": before(
        lambda one: one.optimizer.load_state_dict(one.saved[one.source.choice(sorted(one.saved))])
    ),
    "state of another optimizer loaded": before(lambda one: one.optimizer.load_state_dict(one.foreign)),
    "state forgotten": before(lambda one: one.optimizer.reset_state()),
    "weights synchronized": before(lambda one: one.optimizer.synchronize_weights()),
    "evaluated": before(lambda one: one.optimizer.eval()),
    "closed": before(lambda one: one.optimizer.close()),
    "a parameter frozen": before(lambda one: one.parameter.requires_grad_(False)),
    "a group added": before(
        lambda one: one.optimizer.add_param_group({"params": [("more", nn.Parameter(torch.zeros(5)))]})
    ),
    "parameters exchanged": before(lambda one: one.optimizer.param_groups[0]["params"].reverse()),
}

UNEQUAL_CALLS = {
    *("no step", "two steps", "an iteration less", "an iteration more", "gradients dropped", "left out"),
    *("own state loaded", "state of another optimizer loaded", "state forgotten", "weights synchronized"),
    *("closed", "a group added"),
}
"""Those after which ranks make other collective calls: who never comes cannot be told from who comes late."""
