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

    change: Callable[[random.Random, Build], None]
    names: str

    @property
    def name(self) -> str:
        return self.change.__name__


def another_class(source: random.Random, build: Build) -> None:
    others = [one for one in SUBJECTS if one.name != build.subject.name]
    build.subject = source.choice(others)


def another_stage(source: random.Random, build: Build) -> None:
    stages = [stage for stage in build.subject.entry.stages if stage != build.subject.stage]
    build.subject = Subject(build.subject.name, source.choice(stages))


def another_rate(source: random.Random, build: Build) -> None:
    build.options["lr"] = source.uniform(1e-5, 1e-1)


def other_betas(source: random.Random, build: Build) -> None:
    build.options["betas"] = (source.uniform(0.5, 0.89), source.uniform(0.9, 0.98))


def another_decay(source: random.Random, build: Build) -> None:
    build.options["weight_decay"] = source.uniform(0.1, 0.3)


def another_eps(source: random.Random, build: Build) -> None:
    build.options["eps"] = 10 ** source.uniform(-7, -3)


def another_freeze(source: random.Random, build: Build) -> None:
    build.options[str(build.subject.entry.freeze_option)] = FREEZE + source.choice((-3, -1, 1, 5))


def another_codec(source: random.Random, build: Build) -> None:
    build.options["codec"] = source.choice(("int8", "bf16", "none"))


def another_warmup_wire(source: random.Random, build: Build) -> None:
    build.options["warmup_wire"] = "bf16"


def another_block_size(source: random.Random, build: Build) -> None:
    build.options["block_size"] = source.choice((128, 192, 1024))


def another_bucket_size(source: random.Random, build: Build) -> None:
    build.options["bucket_bytes"] = source.choice((256, 900, 1 << 20))


def another_max_norm(source: random.Random, build: Build) -> None:
    build.options["max_norm"] = source.uniform(0.01, 1.0)


def another_interval(source: random.Random, build: Build) -> None:
    build.options["resync_interval"] = source.randrange(5, 9)


def another_answer_to_drift(source: random.Random, build: Build) -> None:
    build.options["on_drift"] = "raise" if build.options.get("on_drift", "repair") == "repair" else "repair"


def another_dtype(source: random.Random, build: Build) -> None:
    build.options["param_dtype"] = source.choice((torch.bfloat16, torch.float16))


def another_dtype_of_one_parameter(source: random.Random, build: Build) -> None:
    number = source.randrange(len(build.named))
    name, parameter = build.named[number]
    build.named[number] = name, nn.Parameter(parameter.detach().to(torch.bfloat16))


def another_shape(source: random.Random, build: Build) -> None:
    number = source.randrange(len(build.named))
    name, parameter = build.named[number]
    shape = source.choice([(parameter.numel() + 1,), (parameter.numel(), 1), (1, 1, parameter.numel())])
    build.named[number] = name, nn.Parameter(torch.zeros(shape))


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


def a_frozen_parameter(source: random.Random, build: Build) -> None:
    source.choice(build.named)[1].requires_grad_(False)


def other_groups(source: random.Random, build: Build) -> None:
    cut = source.randrange(1, len(build.named))
    build.groups = [{"params": build.named[:cut]}, {"params": build.named[cut:]}]


def an_option_that_nobody_knows(source: random.Random, build: Build) -> None:
    build.options["learning_rate"] = 0.1


def an_option_that_cannot_be(source: random.Random, build: Build) -> None:
    name, value = source.choice(
        [("lr", -1.0), ("betas", (0.9, 1.5)), ("block_size", 100), ("stage", 7), ("on_drift", "ignore"), ("lr", "fast")]
    )
    build.options[name] = value


_EVERYWHERE = [
    BuildKind(another_class, "optimizer|class|OneBit|ZeroOne"),
    BuildKind(another_rate, "'lr'"),
    BuildKind(other_betas, "'betas'"),
    BuildKind(another_decay, "'weight_decay'"),
    BuildKind(another_block_size, "block_size"),
    BuildKind(another_bucket_size, "bucket_bytes"),
    BuildKind(another_max_norm, "max_norm"),
    BuildKind(another_interval, "resync_interval"),
    BuildKind(another_answer_to_drift, "on_drift"),
    BuildKind(another_dtype, "param_dtype"),
    BuildKind(another_dtype_of_one_parameter, r"parameter \d+"),
    BuildKind(another_shape, r"parameter \d+ has shape"),
    BuildKind(another_order, r"parameter \d+ has shape|names\["),
    BuildKind(other_names, r"names\["),
    BuildKind(a_parameter_less, "parameters against"),
    BuildKind(a_parameter_more, "parameters against"),
    BuildKind(a_frozen_parameter, "parameters against|require|gradient"),
    BuildKind(other_groups, "groups"),
    BuildKind(an_option_that_nobody_knows, "learning_rate"),
    BuildKind(an_option_that_cannot_be, "lr|betas|block_size|stage|on_drift"),
]


def build_kinds(subject: Subject) -> list[BuildKind]:
    """Those that an optimizer can have."""
    found = list(_EVERYWHERE)
    if len(subject.entry.stages) > 1:
        found.append(BuildKind(another_stage, "stage"))
    if "eps" in subject.entry.options.model_fields:
        found.append(BuildKind(another_eps, "'eps'"))
    if subject.entry.freeze_option is not None:
        found.append(BuildKind(another_freeze, subject.entry.freeze_option))
    if subject.stage == 0:
        found += [BuildKind(another_codec, "codec"), BuildKind(another_warmup_wire, "warmup_wire")]
    return found
