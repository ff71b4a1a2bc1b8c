"""Every optimizer of the registry at every stage of its, built alike, with so short a schedule that a few steps are of
every kind, and the behaviours that are tried on each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.optim.training import make_model, train, weights
from thinwire.comm import Communicator
from thinwire.compress.codecs import make_codec
from thinwire.compress.packet_layout import CodecName
from thinwire.optim import registry
from thinwire.optim.freeze_group import next_send as next_send_of
from thinwire.optim.registry import OptimizerEntry
from thinwire.optim.settings import OneBitOptions
from thinwire.optim.step import Clock, Send

FREEZE = 6
"""The last warmup step of what has a warmup."""

LOCAL = 12
"""A number of steps before a local one, where there are any."""

_SHORT = {"var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4}


@dataclass(frozen=True)
class Subject:
    """One optimizer at one stage; `wire`: of its warmup; `nodes`: of each rank, if its workers are nodes."""

    name: str
    stage: int
    wire: str = "fp32"
    codec: CodecName = "sign1"
    nodes: tuple[int, ...] = ()

    def __str__(self) -> str:
        unusual = [one for one in (self.wire, self.codec) if one not in ("fp32", "sign1")]
        unusual += ["nodes"] if self.nodes else []
        return "-".join([self.name, str(self.stage), *unusual])

    @property
    def entry(self) -> OptimizerEntry:
        return registry.entry(self.name)

    @property
    def moments(self) -> tuple[int, ...]:
        """Numbers of steps before an exact one, a compressed one, and one that is compressed once frozen."""
        warm = () if self.entry.freeze_option is None else (3, 4) if self.entry.local_steps else (3,)
        return (*warm, FREEZE + 3)

    @property
    def bits(self) -> float:
        """Of an element in a compressed step, scales of its block of 2048 included."""
        codec = make_codec(self.codec)
        return (codec.packet_bytes(2048) - codec.packet_bytes(0)) / 256

    @property
    def packs(self) -> bool:
        """Whether its state is packed once it is frozen."""
        return self.stage > 0 and self.entry.offloads

    def build(self, model: nn.Module, comm: Communicator, **options: Any) -> Any:
        """The optimizer on all of `model`."""
        return self.build_on(model.named_parameters(), comm, **options)

    def build_on(self, params: Any, comm: Communicator, **options: Any) -> Any:
        """The optimizer on parameters or groups of them."""
        known = self.entry.options.model_fields
        defaults = {name: value for name, value in _SHORT.items() if name in known}
        if self.entry.freeze_option is not None:
            defaults[self.entry.freeze_option] = FREEZE
        if self.packs:
            defaults["reversible"] = True
        defaults |= {"lr": 5 * known["lr"].default, "block_size": 64, "bucket_bytes": 2000}
        defaults |= {"stage": self.stage, "warmup_wire": self.wire, "codec": self.codec}
        defaults |= {"nodes": self.nodes} if self.nodes else {}
        return self.entry.load()(params, comm=comm, **(defaults | options))

    def on_model(
        self, comm: Communicator, steps: int = 0, *, dtype: torch.dtype = torch.float32, **options: Any
    ) -> tuple[nn.Module, Any]:
        """The tests' model and the optimizer on it, after this many steps."""
        model = make_model(dtype=dtype)
        optimizer = self.build(model, comm, **options)
        train(model, optimizer, range(steps))
        optimizer.zero_grad()
        return model, optimizer


_OF_ALGORITHMS = [name for name in registry.NAMES if issubclass(registry.entry(name).options, OneBitOptions)]
SUBJECTS = [Subject(name, stage) for name in _OF_ALGORITHMS for stage in registry.entry(name).stages]
HOMES = [
    [one for one in SUBJECTS if (one.stage, one.packs, one.entry.local_steps) == kind]
    for kind in sorted({(one.stage, one.packs, one.entry.local_steps) for one in SUBJECTS})
]
"""Those whose state lies in one kind of home, which does not know the algorithm."""
ROUNDED = [
    Subject("OneBitAdam", 0, "int4"),
    Subject("OneBitAdam", 1, "int4"),
    Subject("OneBitAdam", 2, "int8"),
    Subject("OneBitLamb", 1, "int4"),
    Subject("ZeroOneAdam", 1, "int8"),
]
"""Those whose warmup rounds what it averages, and keeps what that loses."""
CODED = [Subject("OneBitAdam", 2, codec="int4"), Subject("OneBitLamb", 1, codec="stat2")]
"""Those that keep packed state through another codec than sign1."""
BY_NODE = [
    Subject("OneBitAdam", 0, nodes=(0, 0, 1, 1)),
    Subject("OneBitAdam", 2, nodes=(0, 1, 0, 1)),
    Subject("OneBitLamb", 1, "int4", "stat2", (0, 0, 1, 1)),
    Subject("ZeroOneAdam", 1, "bf16", nodes=(0, 1, 1, 0)),
    Subject("OneBitLion", 1, nodes=(0, 0, 1, 1)),
]
"""Those whose workers are nodes of two ranks."""
UNUSUAL = [*ROUNDED, *CODED, *BY_NODE]


def next_send(optimizer: Any) -> Send:
    """What its next step sends."""
    home = optimizer._home
    algorithm = home.groups[0].algorithm if home.groups else home._recipe.algorithm()
    return next_send_of(algorithm, Clock(optimizer.steps, optimizer.frozen_at))


def dyadic(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    """A gradient for each parameter, of few bits: sums of some of them, in whatever order, are exact."""
    generator = torch.Generator().manual_seed(7919 * rank + step)
    return [torch.randint(-16, 17, one.shape, generator=generator) / 8 for one in model.parameters()]


def with_gradients(model: nn.Module, gradients: list[Tensor]) -> Tensor:
    """A loss with these gradients."""
    products = [
        (one * gradient.to(one.dtype)).sum() for one, gradient in zip(model.parameters(), gradients, strict=True)
    ]
    return torch.stack(products).sum()


# Behaviours: one body, which runs on every rank, noted with the numbers of ranks to try it on

Body = Callable[[Communicator, Subject], Any]

SIZES: dict[Body, tuple[int, ...]] = {}
"""Every behaviour, with the numbers of ranks that it is tried on."""

EVERYWHERE: set[Body] = set()
"""Behaviours that what is rounded or packed may break, each by itself."""

OF_HOMES: set[Body] = set()
"""Behaviours in which the algorithm has no say: in each kind of home one of its algorithms meets them, by turns."""

WARNS: dict[Body, tuple[str, tuple[int, ...]]] = {}
"""What a behaviour must warn of, and at which stages, once for each call of it on all ranks; nothing else may warn."""


def behaviour(
    *sizes: int,
    warns: str | None = None,
    at: tuple[int, ...] = (0, 1, 2),
    everywhere: bool = False,
    of_home: bool = False,
) -> Callable[[Body], Body]:
    """Try a body on these numbers of ranks."""

    def note(body: Body) -> Body:
        SIZES[body] = sizes
        if warns is not None:
            WARNS[body] = warns, at
        if everywhere:
            EVERYWHERE.add(body)
        if of_home:
            OF_HOMES.add(body)
        return body

    return note


def alike(comm: Communicator, model: nn.Module) -> bool:
    """Whether every rank has the same bits of the weights. Collective."""
    return len(set(comm.all_gather_bytes(weights(model).numpy().tobytes()))) == 1
