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

    @property
    def gradient(self) -> Tensor:
        """Any, after a backward; of one that has none nothing is seen."""
        gradient = self.parameter.grad
        return torch.zeros(1) if gradient is None else gradient

    def with_values(self, change: Callable[[Tensor], Tensor], *, of_all: bool) -> None:
        """A backward whose gradients are what `change` makes of them, from the first on."""
        chosen = list(self.model.parameters()) if of_all else [self.parameter]
        hooks = [parameter.register_hook(change) for parameter in chosen]
        self.backward()
        for hook in hooks:
            hook.remove()

    def one_element(self) -> None:
        value = self.source.choice((math.nan, math.inf, -math.inf, 3e38, -3e38, 1e25))

        def change(gradient: Tensor) -> Tensor:
            changed = gradient.clone()
            changed[(0,) * gradient.dim()] = value
            return changed

        self.with_values(change, of_all=False)

    def all_elements(self) -> None:
        value = self.source.choice((math.nan, math.inf, -math.inf, 3e38, -3e38, 1e25, 1e-40, -1e-45, 0.0, -0.0))
        self.with_values(lambda gradient: torch.full_like(gradient, value), of_all=self.source.random() < 0.5)

    def times_a_power(self) -> None:
        factor = 10.0 ** self.source.choice((-44, -38, -30, -20, 15, 20, 30, 37))
        self.with_values(lambda gradient: gradient * factor, of_all=True)

    def a_loss_that_is_no_number(self) -> None:
        factor = self.source.choice((math.nan, math.inf, -math.inf))
        (factor * loss_of(self.model, self.optimizer.comm.rank, self.number)).backward()

    def set_all(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)

    def set_one(self, gradient: Callable[[Tensor], Tensor | None] = torch.ones_like) -> None:
        parameter = self.parameter
        parameter.grad = gradient(parameter)

    @torch.no_grad()
    def edit(self) -> None:
        self.gradient.mul_(self.source.choice((0.5, -1.0, 0.0, math.nan)))

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.source.choice((1e-3, 1.0, math.inf)))

    def one_tensor_for_two(self) -> None:
        weight, other = self.model[0].weight, self.model[2].weight
        weight.grad = None if other.grad is None else other.grad.view(-1)[: weight.numel()].view_as(weight)


Kind = Callable[[Step], object]
"""A backward, and what is done to its gradients."""


def after(change: Callable[[Step], object]) -> Kind:
    """Something that is done after a backward."""
    return lambda step: (step.backward(), change(step))


KINDS: dict[str, Kind] = {
    "one element": Step.one_element,
    "one element, once more": Step.one_element,
    "all elements": Step.all_elements,
    "all elements, once more": Step.all_elements,
    "times a power": Step.times_a_power,
    "the loss is no number": Step.a_loss_that_is_no_number,
    "none for some": lambda step: step.model[0](torch.ones(4, 6)).square().sum().backward(),
    "none at all": lambda step: None,
    "set by hand": Step.set_all,
    "set by hand for some": Step.set_one,
    "sparse": after(lambda step: step.set_one(lambda one: torch.ones_like(one).to_sparse())),
    "of another dtype": after(lambda step: setattr(one := step.gradient, "data", one.data.double())),
    "of another shape": after(lambda step: setattr(step.gradient, "data", torch.ones(3))),
    "edited": after(Step.edit),
    "clipped": after(Step.clip),
    "replaced": after(Step.set_one),
    "dropped": after(lambda step: step.set_one(lambda _: None)),
    "the same tensor for two": after(Step.one_tensor_for_two),
}


@dataclass(frozen=True)
class Trial:
    """`kind` befalls the ranks `odd` in step `moment`; `repeats` of them."""

    subject: Subject
    kind: str
    odd: tuple[int, ...]
    moment: int
    repeats: int
    options: dict[str, Any]
    seed: str

    def __str__(self) -> str:
        when = f"in {self.moment}" + (f" to {self.moment + self.repeats - 1}" if self.repeats > 1 else "")
        return f"{self.seed}: {self.subject}, {self.kind} on ranks {self.odd} {when}, {self.options}"

    @classmethod
    def random(cls, seed: str) -> Trial:
        """The one of a seed."""
        source = random.Random(seed)
        odd = source.choice([(0,), (1,), (0, 1)])
        options: dict[str, Any] = {"max_norm": source.choice((0.0, 0.0, 0.5)), "resync_interval": 3}
        moment = source.choice((0, 3, 4, 5, FREEZE - 1, FREEZE, FREEZE + 1, FREEZE + 3, FREEZE + 5, 2 * FREEZE))
        repeats = source.choice((1, 1, 3))
        return cls(source.choice(SUBJECTS), source.choice(list(KINDS)), odd, moment, repeats, options, seed)


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
        (KINDS[trial.kind] if number in befallen and comm.rank in trial.odd else Step.backward)(step)
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
