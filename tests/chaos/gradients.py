"""Gradients that are no numbers, too large, missing, sparse, or edited after a backward: weights stay finite and the
same on all ranks, or every rank has an error of ours."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.chaos.outcome import Outcome, over_seeds
from tests.chaos.ranks import digest, faults, run_ranks
from tests.optim.subject import FREEZE, SUBJECTS, Subject
from tests.optim.training import exchange_comm, loss_of, make_model, weights
from thinwire.comm import Communicator

SIZE = 2
STEPS_AFTER = 6


@dataclass
class Step:
    """One rank's step in which something is done to its gradients."""

    model: nn.Sequential
    optimizer: Any
    source: random.Random
    number: int

    def backward(self) -> None:
        loss_of(self.model, self.optimizer.comm.rank, self.number).backward()

    @property
    def parameter(self) -> Tensor:
        """Any."""
        return self.source.choice(list(self.model.parameters()))


Kind = Callable[[Step], None]
"""A backward, and what is done to its gradients."""


def _with_values(step: Step, change: Callable[[Tensor], Tensor], *, of_all: bool) -> None:
    """A backward whose gradients are what `change` makes of them, from the first on."""
    chosen = list(step.model.parameters()) if of_all else [step.parameter]
    hooks = [parameter.register_hook(change) for parameter in chosen]
    step.backward()
    for hook in hooks:
        hook.remove()


def one_element(step: Step) -> None:
    value = step.source.choice((math.nan, math.inf, -math.inf, 3e38, -3e38, 1e25))

    def change(gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        changed[(0,) * gradient.dim()] = value
        return changed

    _with_values(step, change, of_all=False)


def all_elements(step: Step) -> None:
    value = step.source.choice((math.nan, math.inf, -math.inf, 3e38, -3e38, 1e25, 1e-40, -1e-45, 0.0, -0.0))
    _with_values(step, lambda gradient: torch.full_like(gradient, value), of_all=step.source.random() < 0.5)


def times_a_power(step: Step) -> None:
    factor = 10.0 ** step.source.choice((-44, -38, -30, -20, 15, 20, 30, 37))
    _with_values(step, lambda gradient: gradient * factor, of_all=True)


def the_loss_is_no_number(step: Step) -> None:
    factor = step.source.choice((math.nan, math.inf, -math.inf))
    (factor * loss_of(step.model, step.optimizer.comm.rank, step.number)).backward()


def none_for_some(step: Step) -> None:
    step.model[0](torch.ones(4, 6)).square().sum().backward()


def none_at_all(step: Step) -> None:
    return


def set_by_hand(step: Step) -> None:
    for parameter in step.model.parameters():
        parameter.grad = torch.ones_like(parameter)


def set_by_hand_for_some(step: Step) -> None:
    parameter = step.parameter
    parameter.grad = torch.ones_like(parameter)


def sparse(step: Step) -> None:
    step.backward()
    parameter = step.parameter
    parameter.grad = torch.ones_like(parameter).to_sparse()


def of_another_dtype(step: Step) -> None:
    step.backward()
    gradient = step.parameter.grad
    if gradient is not None:
        gradient.data = gradient.data.double()


def of_another_shape(step: Step) -> None:
    step.backward()
    gradient = step.parameter.grad
    if gradient is not None:
        gradient.data = torch.ones(3)


def edited(step: Step) -> None:
    step.backward()
    gradient = step.parameter.grad
    if gradient is not None:
        with torch.no_grad():
            gradient.mul_(step.source.choice((0.5, -1.0, 0.0, math.nan)))


def clipped(step: Step) -> None:
    step.backward()
    nn.utils.clip_grad_norm_(step.model.parameters(), step.source.choice((1e-3, 1.0, math.inf)))


def replaced(step: Step) -> None:
    step.backward()
    parameter = step.parameter
    parameter.grad = torch.ones_like(parameter)


def dropped(step: Step) -> None:
    step.backward()
    step.parameter.grad = None


def the_same_tensor_for_two(step: Step) -> None:
    step.backward()
    weight, other = step.model[0].weight, step.model[2].weight
    weight.grad = None if other.grad is None else other.grad.view(-1)[: weight.numel()].view_as(weight)


KINDS: list[Kind] = [
    one_element,
    one_element,
    all_elements,
    all_elements,
    times_a_power,
    the_loss_is_no_number,
    none_for_some,
    none_at_all,
    set_by_hand,
    set_by_hand_for_some,
    sparse,
    of_another_dtype,
    of_another_shape,
    edited,
    clipped,
    replaced,
    dropped,
    the_same_tensor_for_two,
]


@dataclass(frozen=True)
class Trial:
    """`kind` befalls the ranks `odd` in step `moment`; `repeats` of them."""

    subject: Subject
    kind: Kind
    odd: tuple[int, ...]
    moment: int
    repeats: int
    options: dict[str, Any]
    seed: str

    def __str__(self) -> str:
        when = f"in {self.moment}" + (f" to {self.moment + self.repeats - 1}" if self.repeats > 1 else "")
        return f"{self.seed}: {self.subject}, {self.kind.__name__} on ranks {self.odd} {when}, {self.options}"

    @classmethod
    def random(cls, seed: str) -> Trial:
        """The one of a seed."""
        source = random.Random(seed)
        odd = source.choice([(0,), (1,), (0, 1)])
        options: dict[str, Any] = {"max_norm": source.choice((0.0, 0.0, 0.5)), "resync_interval": 3}
        moment = source.choice((0, 3, 4, 5, FREEZE - 1, FREEZE, FREEZE + 1, FREEZE + 3, FREEZE + 5, 2 * FREEZE))
        repeats = source.choice((1, 1, 3))
        return cls(source.choice(SUBJECTS), source.choice(KINDS), odd, moment, repeats, options, seed)


def train_through(comm: Communicator, trial: Trial) -> str:
    """Train on one rank, and say what weights it has in the end."""
    source = random.Random(trial.seed + " of the rank")
    model = make_model()
    assert isinstance(model, nn.Sequential)
    optimizer = trial.subject.build(model, comm, **trial.options)
    befallen = range(trial.moment, trial.moment + trial.repeats)
    for number in range(trial.moment + trial.repeats + STEPS_AFTER):
        optimizer.zero_grad()
        step = Step(model, optimizer, source, number)
        (trial.kind if number in befallen and comm.rank in trial.odd else Step.backward)(step)
        optimizer.step()
    optimizer.synchronize_weights()
    exchange_comm(optimizer).barrier()  # who comes to the end alone hears of the others' errors here
    return digest(model) + ("" if bool(weights(model).isfinite().all()) else ", not finite")


def one(seed: str) -> list[str]:
    """What is wrong with the trial of that seed."""
    trial = Trial.random(seed)
    ends = run_ranks(lambda comm: train_through(comm, trial), SIZE)
    found = faults(ends)
    if any("not finite" in str(end.result) for end in ends):
        found.append("weights are not finite")
    return [f"{trial}: {fault}" for fault in found]


def run(count: int, seed: int) -> Outcome:
    """Try so many."""
    return over_seeds(one, count, seed)
