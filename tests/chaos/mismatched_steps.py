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

    model: nn.Module
    optimizer: Any
    source: random.Random
    foreign: dict[str, Any]
    saved: dict[int, dict[str, Any]] = field(default_factory=dict)

    def backward(self, step: int) -> None:
        loss_of(self.model, self.optimizer.comm.rank, step).backward()

    def iterate(self, step: int) -> None:
        """One step as it should be."""
        self.optimizer.zero_grad()
        self.backward(step)
        self.optimizer.step()

    @property
    def group(self) -> dict[str, Any]:
        group: dict[str, Any] = self.optimizer.param_groups[0]
        return group

    @property
    def parameter(self) -> Tensor:
        """Any."""
        return self.source.choice(list(self.model.parameters()))


StepKind = Callable[[Training, int], None]
"""Does one rank's iteration of that number."""


def rate_changed(training: Training, step: int) -> None:
    training.group["lr"] *= training.source.choice((0.0, 0.5, 1.001, 7.0))
    training.iterate(step)


def betas_changed(training: Training, step: int) -> None:
    training.group["betas"] = (training.source.uniform(0.1, 0.8), training.group["betas"][1])
    training.iterate(step)


def decay_changed(training: Training, step: int) -> None:
    training.group["weight_decay"] = training.source.uniform(1e-4, 0.3)
    training.iterate(step)


def eps_changed(training: Training, step: int) -> None:
    if "eps" in training.group:
        training.group["eps"] = 10 ** training.source.uniform(-7, -2)
    training.iterate(step)


def loss_scale_changed(training: Training, step: int) -> None:
    training.optimizer.loss_scale = 64.0
    training.iterate(step)


def two_backwards(training: Training, step: int) -> None:
    training.optimizer.zero_grad()
    training.backward(step)
    training.backward(step + 100)
    training.optimizer.step()


def two_backwards_that_add_up(training: Training, step: int) -> None:
    training.optimizer.zero_grad()
    with training.optimizer.no_sync():
        training.backward(step)
    training.backward(step + 100)
    training.optimizer.step()


def only_backwards_that_add_up(training: Training, step: int) -> None:
    training.optimizer.zero_grad()
    with training.optimizer.no_sync():
        training.backward(step)
    training.optimizer.step()


def no_backward(training: Training, step: int) -> None:
    training.optimizer.zero_grad()
    training.optimizer.step()


def half_a_backward(training: Training, step: int) -> None:
    training.optimizer.zero_grad()
    layers = training.model
    assert isinstance(layers, nn.Sequential)
    layers[0](torch.ones(4, 6)).square().sum().backward()
    training.optimizer.step()


def no_step(training: Training, step: int) -> None:
    training.optimizer.zero_grad()
    training.backward(step)


def two_steps(training: Training, step: int) -> None:
    training.iterate(step)
    training.optimizer.step()


def an_iteration_less(training: Training, step: int) -> None:
    return


def an_iteration_more(training: Training, step: int) -> None:
    training.iterate(step)
    training.iterate(step)


def gradients_dropped(training: Training, step: int) -> None:
    training.optimizer.zero_grad()
    training.backward(step)
    training.optimizer.zero_grad()
    training.optimizer.step()


@torch.no_grad()
def _write(training: Training) -> None:
    parameter = training.parameter
    parameter[(0,) * parameter.dim()] += training.source.choice((1e-6, 0.1, 3.0))


def weights_changed(training: Training, step: int) -> None:
    _write(training)
    training.iterate(step)


def weights_changed_after_backward(training: Training, step: int) -> None:
    training.optimizer.zero_grad()
    training.backward(step)
    _write(training)
    training.optimizer.step()


def data_replaced(training: Training, step: int) -> None:
    parameter = training.parameter
    parameter.data = parameter.data.clone()
    training.iterate(step)


def data_replaced_by_others(training: Training, step: int) -> None:
    parameter = training.parameter
    parameter.data = parameter.data + 0.01
    training.iterate(step)


def data_of_another_dtype(training: Training, step: int) -> None:
    training.model.double()
    training.model.float()
    training.iterate(step)


def another_model_loaded(training: Training, step: int) -> None:
    training.model.load_state_dict(make_model(seed=3).state_dict())
    training.iterate(step)


def left_out(training: Training, step: int) -> None:
    training.optimizer.zero_grad()
    layers = training.model
    assert isinstance(layers, nn.Sequential)
    training.optimizer.leave_out(layers[4].parameters())
    layers[2](layers[0](torch.ones(4, 6))).square().sum().backward()
    training.optimizer.step()


def own_state_loaded(training: Training, step: int) -> None:
    training.optimizer.load_state_dict(training.saved[training.source.choice(sorted(training.saved))])
    training.iterate(step)


def state_of_another_optimizer_loaded(training: Training, step: int) -> None:
    training.optimizer.load_state_dict(training.foreign)
    training.iterate(step)


def state_forgotten(training: Training, step: int) -> None:
    training.optimizer.reset_state()
    training.iterate(step)


def weights_synchronized(training: Training, step: int) -> None:
    training.optimizer.synchronize_weights()
    training.iterate(step)


def evaluated(training: Training, step: int) -> None:
    training.optimizer.eval()
    training.iterate(step)


def closed(training: Training, step: int) -> None:
    training.optimizer.close()
    training.iterate(step)


def a_parameter_frozen(training: Training, step: int) -> None:
    training.parameter.requires_grad_(False)
    training.iterate(step)


def a_group_added(training: Training, step: int) -> None:
    training.optimizer.add_param_group({"params": [("more", nn.Parameter(torch.zeros(5)))]})
    training.iterate(step)


def parameters_exchanged(training: Training, step: int) -> None:
    training.group["params"].reverse()
    training.iterate(step)


STEP_KINDS: list[StepKind] = [
    rate_changed,
    betas_changed,
    decay_changed,
    eps_changed,
    loss_scale_changed,
    two_backwards,
    two_backwards_that_add_up,
    only_backwards_that_add_up,
    no_backward,
    half_a_backward,
    no_step,
    two_steps,
    an_iteration_less,
    an_iteration_more,
    gradients_dropped,
    weights_changed,
    weights_changed_after_backward,
    data_replaced,
    data_replaced_by_others,
    data_of_another_dtype,
    another_model_loaded,
    left_out,
    own_state_loaded,
    state_of_another_optimizer_loaded,
    state_forgotten,
    weights_synchronized,
    evaluated,
    closed,
    a_parameter_frozen,
    a_group_added,
    parameters_exchanged,
]

UNEQUAL_CALLS: list[StepKind | None] = [
    no_step,
    two_steps,
    an_iteration_less,
    an_iteration_more,
    gradients_dropped,
    left_out,
    own_state_loaded,
    state_of_another_optimizer_loaded,
    state_forgotten,
    weights_synchronized,
    closed,
    a_group_added,
]
"""Those after which ranks make other collective calls: nobody can tell who never comes from who comes late."""
