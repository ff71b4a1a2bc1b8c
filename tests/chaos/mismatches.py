"""Ranks of which one differs from the others, in what it builds or in what it does: an error of ours on every rank, or
the same weights on all of them eight steps later."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tests.chaos.harness import digest, each_seed, faults, run_ranks
from tests.optim.subject import FREEZE, SUBJECTS, Subject
from tests.optim.training import exchange_comm, loss_of, make_model, train
from thinwire.comm import Communicator, threads

Named = list[tuple[str, Tensor]]


@dataclass
class Build:
    """What an optimizer is built from. `groups`: parameter groups, where there are several."""

    subject: Subject
    named: Named
    options: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class BuildKind:
    """`change` makes one rank's build another; `names`: what an error has to match, written with `re`."""

    name: str
    change: Callable[[random.Random, Build], object]
    names: str


def option(name: str, value: Callable[[random.Random], Any], names: str = "") -> BuildKind:
    """Another value of an option."""
    return BuildKind(
        f"another {name}", lambda source, build: build.options.update({name: value(source)}), names or name
    )


def parameter(change: Callable[[random.Random, Tensor], Tensor]) -> Callable[[random.Random, Build], None]:
    """Something else in the place of any one parameter."""

    def replace(source: random.Random, build: Build) -> None:
        number = source.randrange(len(build.named))
        name, before = build.named[number]
        build.named[number] = name, change(source, before)

    return replace


def another_class(source: random.Random, build: Build) -> None:
    build.subject = source.choice([one for one in SUBJECTS if one.name != build.subject.name])


def another_stage(source: random.Random, build: Build) -> None:
    stages = [stage for stage in build.subject.entry.stages if stage != build.subject.stage]
    build.subject = Subject(build.subject.name, source.choice(stages))


def another_answer_to_drift(source: random.Random, build: Build) -> None:
    build.options["on_drift"] = "raise" if build.options.get("on_drift", "repair") == "repair" else "repair"


def another_shape(source: random.Random, before: Tensor) -> Tensor:
    shape = source.choice([(before.numel() + 1,), (before.numel(), 1), (1, 1, before.numel())])
    return nn.Parameter(torch.zeros(shape))


def another_order(source: random.Random, build: Build) -> None:
    first, second = source.sample(range(len(build.named)), 2)
    build.named[first], build.named[second] = build.named[second], build.named[first]


def other_names(source: random.Random, build: Build) -> None:
    number = source.randrange(len(build.named))
    build.named[number] = f"module.{build.named[number][0]}", build.named[number][1]


def a_parameter_less(source: random.Random, build: Build) -> None:
    del build.named[source.randrange(len(build.named))]


def a_parameter_more(source: random.Random, build: Build) -> None:
    build.named.insert(source.randrange(len(build.named)), ("more", nn.Parameter(torch.zeros(source.randrange(9)))))


def other_groups(source: random.Random, build: Build) -> None:
    cut = source.randrange(1, len(build.named))
    build.groups = [{"params": build.named[:cut]}, {"params": build.named[cut:]}]


def an_option_that_cannot_be(source: random.Random, build: Build) -> None:
    name, value = source.choice(
        [("lr", -1.0), ("betas", (0.9, 1.5)), ("block_size", 100), ("stage", 7), ("on_drift", "ignore"), ("lr", "fast")]
    )
    build.options[name] = value


_EVERYWHERE = [
    BuildKind("another class", another_class, "optimizer|class|OneBit|ZeroOne"),
    option("lr", lambda source: source.uniform(1e-5, 1e-1), "'lr'"),
    option("betas", lambda source: (source.uniform(0.5, 0.89), source.uniform(0.9, 0.98)), "'betas'"),
    option("weight_decay", lambda source: source.uniform(0.1, 0.3), "'weight_decay'"),
    option("block_size", lambda source: source.choice((128, 192, 1024))),
    option("bucket_bytes", lambda source: source.choice((256, 900, 1 << 20))),
    option("max_norm", lambda source: source.uniform(0.01, 1.0)),
    option("resync_interval", lambda source: source.randrange(5, 9)),
    BuildKind("another answer to drift", another_answer_to_drift, "on_drift"),
    option("param_dtype", lambda source: source.choice((torch.bfloat16, torch.float16))),
    BuildKind(
        "another dtype of one parameter",
        parameter(lambda source, before: nn.Parameter(before.detach().to(torch.bfloat16))),
        r"parameter \d+",
    ),
    BuildKind("another shape", parameter(another_shape), r"parameter \d+ has shape"),
    BuildKind("another order", another_order, r"parameter \d+ has shape|names\["),
    BuildKind("other names", other_names, r"names\["),
    BuildKind("a parameter less", a_parameter_less, "number of parameters"),
    BuildKind("a parameter more", a_parameter_more, "number of parameters"),
    BuildKind(
        "a frozen parameter",
        lambda source, build: source.choice(build.named)[1].requires_grad_(False),
        "number of parameters|require|gradient",
    ),
    BuildKind("other groups", other_groups, "groups"),
    option("learning_rate", lambda source: 0.1),
    BuildKind("an option that cannot be", an_option_that_cannot_be, "lr|betas|block_size|stage|on_drift"),
]


def build_kinds(subject: Subject) -> list[BuildKind]:
    """Those that an optimizer can have."""
    found, entry = list(_EVERYWHERE), subject.entry
    if len(entry.stages) > 1:
        found.append(BuildKind("another stage", another_stage, "stage"))
    if "eps" in entry.options.model_fields:
        found.append(option("eps", lambda source: 10 ** source.uniform(-7, -3), "'eps'"))
    if entry.freeze_option is not None:
        found.append(option(entry.freeze_option, lambda source: FREEZE + source.choice((-3, -1, 1, 5))))
    if subject.stage == 0:
        found.append(option("codec", lambda source: source.choice(("int8", "bf16", "none"))))
        found.append(option("warmup_wire", lambda source: "bf16"))
    return found


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


STEPS_AFTER = 8
LAST_MOMENT = 16


@dataclass(frozen=True)
class Mismatch:
    """Rank `odd` of `size` differs, by `build` or by `step` in step `moment`."""

    subject: Subject
    size: int
    odd: int
    moment: int
    options: dict[str, Any]
    build: BuildKind | None
    step: str | None
    seed: str

    def __str__(self) -> str:
        kind = self.build.name if self.build is not None else f"{self.step} in {self.moment}"
        return f"{self.subject}, rank {self.odd} of {self.size}, {kind}, {self.options}"

    @classmethod
    def random(cls, seed: str) -> Mismatch:
        """The one of a seed."""
        source = random.Random(seed)
        subject = source.choice(SUBJECTS)
        size = source.choice((2, 2, 3))
        options: dict[str, Any] = {
            "resync_interval": source.choice((1, 2, 3, 4)),
            "on_drift": source.choice(("repair", "raise")),
        }
        if source.random() < 0.25:
            options["max_norm"] = 0.5
        build = source.choice(build_kinds(subject)) if source.random() < 0.4 else None
        step = None if build is not None else source.choice(list(STEP_KINDS))
        return cls(subject, size, source.randrange(size), source.randrange(LAST_MOMENT), options, build, step, seed)


def train_apart(comm: Communicator, mismatch: Mismatch) -> str:
    """Train on one rank, and say what weights it has in the end."""
    source = random.Random(mismatch.seed + " of the rank")
    model = make_model()
    build = Build(mismatch.subject, list(model.named_parameters()), dict(mismatch.options))
    odd = comm.rank == mismatch.odd
    if odd and mismatch.build is not None:
        mismatch.build.change(source, build)
    given = build.named if build.groups is None else build.groups
    optimizer = build.subject.build_on(given, comm, **build.options)
    training = Training(model, optimizer, source, foreign_state(mismatch.subject))
    for step in range(mismatch.moment + 1 + STEPS_AFTER):
        if odd and step == mismatch.moment and mismatch.step is not None:
            STEP_KINDS[mismatch.step](training, step)
        else:
            training.iterate(step)
        if mismatch.step is not None and step < mismatch.moment + 1 and step % 4 == 0:
            training.saved[step] = optimizer.state_dict()
    optimizer.synchronize_weights()
    exchange_comm(optimizer).barrier()  # who comes to the end alone hears of the others' errors here
    return digest(model)


@cache
def foreign_state(subject: Subject) -> dict[str, Any]:
    """What another optimizer saves."""
    other = next(one for one in SUBJECTS if one.name != subject.name and one.stage == 0)

    def state(comm: Communicator) -> dict[str, Any]:
        model = make_model()
        optimizer = other.build(model, comm)
        train(model, optimizer, range(3))
        found: dict[str, Any] = optimizer.state_dict()
        return found

    return threads.run(state, 1)[0]


@each_seed
def run(seed: str) -> list[str]:
    """What is wrong with the mismatch of that seed."""
    mismatch = Mismatch.random(seed)
    foreign_state(mismatch.subject)
    ends = run_ranks(lambda comm: train_apart(comm, mismatch), mismatch.size)
    names = mismatch.build.names if mismatch.build is not None else "rank"
    found = faults(ends, names, may_wait=mismatch.step in UNEQUAL_CALLS)
    return [f"{mismatch}: {fault}" for fault in found]
