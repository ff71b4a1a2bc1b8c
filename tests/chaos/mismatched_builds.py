"""Ways in which one rank may build another optimizer than the others do."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.optim.subject import FREEZE, SUBJECTS, Subject

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
    BuildKind("a parameter less", a_parameter_less, "parameters against"),
    BuildKind("a parameter more", a_parameter_more, "parameters against"),
    BuildKind(
        "a frozen parameter",
        lambda source, build: source.choice(build.named)[1].requires_grad_(False),
        "parameters against|require|gradient",
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
