"""Training to which something happens: weights stay finite and alike on all ranks, or every rank has an error of ours.

`gradients`: some that are no numbers, too large, missing, sparse, or edited after a backward. `drift`: long training
with all that may happen on the way, and no repair of replicas. `many_parameters`: thousands of tiny ones; a resume goes
on bit for bit, a step makes no more collectives than it has buckets for, and its Python calls grow with the parameters,
not with their square.
"""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from tests.chaos.harness import Outcome, digest, each_seed, faults, run_ranks
from tests.optim.subject import FREEZE, SUBJECTS, Subject
from tests.optim.training import batch, exchange_comm, loss_of, make_model, through_a_file, weights
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
        return f"{self.subject}, {self.kind} on ranks {self.odd} {when}, {self.options}"

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


@each_seed
def gradients(seed: str) -> list[str]:
    """What is wrong with the trial of that seed."""
    trial = Trial.random(seed)
    ends = run_ranks(lambda comm: train_through(comm, trial), SIZE)
    found = faults(ends)
    if any("not finite" in str(end.result) for end in ends):
        found.append("weights are not finite")
    return [f"{trial}: {fault}" for fault in found]


BETWEEN_COMPARISONS = 50
NEVER = 1 << 30


@dataclass
class Voyage:
    """One rank's training. `chance` draws the same on every rank."""

    subject: Subject
    comm: Communicator
    model: nn.Sequential
    optimizer: Any
    chance: random.Random
    rate: float

    def loss(self, number: int, layers: int) -> Tensor:
        """Of the first so many layers, which is all that its backward reaches."""
        inputs, wanted = batch(self.comm.rank, number)
        for layer in list(self.model)[:layers]:
            inputs = layer(inputs)
        return (inputs.mean(dim=1, keepdim=True) - wanted).square().mean()

    def layers(self) -> int:
        """How many the next backward reaches: now and then not all, where state is sharded not on every rank."""
        some = self.chance.choice((1, 3)) if self.chance.random() < 0.1 else len(self.model)
        only_one_rank = self.chance.random() < 0.5 and self.subject.stage > 0
        return len(self.model) if only_one_rank and self.comm.rank == 0 else some

    def step(self, number: int) -> None:
        """One, with what befalls it."""
        chance, optimizer = self.chance, self.optimizer
        if chance.random() < 0.2:
            optimizer.param_groups[0]["lr"] = self.rate * 10 ** chance.uniform(-3, 0.5)
        optimizer.zero_grad()
        if chance.random() < 0.2:
            with optimizer.no_sync():
                for again in range(chance.choice((1, 2))):
                    self.loss(100_000 * (again + 1) + number, self.layers()).backward()
        overflowing = chance.choice((0, 1)) if chance.random() < 0.05 else None
        factor = chance.choice((math.nan, math.inf, 1e30))
        loss = self.loss(number, self.layers())
        (factor * loss if self.comm.rank == overflowing else loss).backward()
        if chance.random() < 0.05:
            optimizer.zero_grad()  # drops the step
        else:
            optimizer.step()
        if chance.random() < 0.02:
            optimizer.synchronize_weights()


def sail(comm: Communicator, subject: Subject, steps: int, seed: str) -> str:
    """Train on one rank; raises AssertionError where ranks are apart or weights not finite."""
    chance = random.Random(seed)
    model = make_model()
    assert isinstance(model, nn.Sequential)
    max_norm = chance.choice((0.0, 0.5))
    optimizer = subject.build(model, comm, resync_interval=NEVER, max_norm=max_norm)
    voyage = Voyage(subject, comm, model, optimizer, chance, optimizer.param_groups[0]["lr"])
    due = False
    for number in range(steps):
        voyage.step(number)
        due = due or number % BETWEEN_COMPARISONS == 0
        if due and optimizer.in_sync:
            of_rank = comm.all_gather_bytes(digest(model).encode())
            assert len(set(of_rank)) == 1, f"replicas differ after iteration {number}, step {optimizer.steps}"
            assert bool(weights(model).isfinite().all()), f"weights are not finite after iteration {number}"
            due = False
    optimizer.zero_grad()
    optimizer.synchronize_weights()
    return digest(model)


def drift(count: int, seed: int) -> Outcome:
    """Train every optimizer at every stage for so many iterations."""
    outcome = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for subject in SUBJECTS:
            ends = run_ranks(lambda comm, subject=subject: sail(comm, subject, count, f"{seed}"), SIZE)
            found = [f"rank {rank}: {end.error}" for rank, end in enumerate(ends) if end.error is not None]
            outcome.note(f"{seed}: {subject}: {fault}" for fault in found or faults(ends))
            outcome.tried += count - 1  # of iterations
    return outcome


STEPS_RESUMED = 4
MOST_GROWTH = 1.25
"""Of Python calls for each parameter, where there are four times as many."""
# Two for each bucket, one vote, an agreement on arrival or absence with its two gathers, a comparison of weights.
MOST_CALLS_BESIDE_BUCKETS = 8


class Many(nn.Module):
    """So many parameters of 1 to 5 elements."""

    def __init__(self, count: int, seed: str) -> None:
        super().__init__()
        chance = random.Random(seed)
        generator = torch.Generator().manual_seed(0)
        self.all = nn.ParameterList(torch.randn(chance.randint(1, 5), generator=generator) for _ in range(count))

    def loss(self, rank: int, step: int) -> Tensor:
        """Of which every parameter's gradient differs from rank to rank and step to step."""
        wanted = torch.Generator().manual_seed(1000 * rank + step)
        return (torch.cat(list(self.all)) - torch.randn(1, generator=wanted)).square().mean()


@dataclass
class CallCount:
    """How many Python functions this thread has called."""

    calls: int = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += event == "call"


def iterate(model: Many, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model.loss(optimizer.comm.rank, step).backward()
    optimizer.step()


def train_many(comm: Communicator, subject: Subject, count: int, seed: str) -> tuple[str, float]:
    """The digest of a rank's weights, and its Python calls for each parameter in a frozen step.

    Raises AssertionError where something is wrong.
    """
    model = Many(count, seed)
    optimizer = subject.build(model, comm, bucket_bytes=1 << 14)
    for step in range(FREEZE + 2):
        iterate(model, optimizer, step)
    counted, traffic = CallCount(), exchange_comm(optimizer).traffic
    before = traffic.calls
    with counted.counting():
        iterate(model, optimizer, FREEZE + 2)
    buckets = -(-sum(one.numel() for one in model.parameters()) * 4 // (1 << 14)) + 1
    made = traffic.calls - before
    assert made <= 2 * buckets + MOST_CALLS_BESIDE_BUCKETS, f"{made} collectives in a step of {buckets} buckets"

    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    resumed = Many(count, seed)
    again = subject.build(resumed, comm, bucket_bytes=1 << 14)
    for part, state in zip((resumed, again), saved, strict=True):
        part.load_state_dict(state)
    for of_one, trained_by in ((model, optimizer), (resumed, again)):
        for step in range(FREEZE + 3, FREEZE + 3 + STEPS_RESUMED):
            iterate(of_one, trained_by, step)
        trained_by.synchronize_weights()
    assert digest(model) == digest(resumed), "what was resumed goes on otherwise"
    return digest(model), counted.calls / count


def many_parameters(count: int, seed: int) -> Outcome:
    """Train so many parameters, and a quarter of them, with every optimizer at every stage."""
    outcome = Outcome()
    for subject in SUBJECTS:
        ends = [
            run_ranks(lambda comm, some=some, subject=subject: train_many(comm, subject, some, f"{seed}"), SIZE)
            for some in (count // 4, count)
        ]
        found = [f"rank {rank}: {end.error!r}" for few in ends for rank, end in enumerate(few) if end.error is not None]
        if not found:
            few, many = (max(end.result[1] for end in of_some) for of_some in ends)
            if many > MOST_GROWTH * few:
                found.append(f"{few:.0f} Python calls for each of {count // 4} parameters, {many:.0f} of {count}")
            for end in ends[1]:
                end.result = end.result[0]
            found += faults(ends[1])
        outcome.note(f"{seed}: {subject} with {count} parameters: {fault}" for fault in found)
        outcome.tried += count - 1  # of parameters
    return outcome
