"""The step in flight, and what it is a step of: parameters with their hyperparameters now, between warmup and frozen
stage, one by one and by group; and what a checkpoint says of where they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from thinwire.compress.packet import Flags
from thinwire.compress.packet_layout import BlockCodecName, CodecName
from thinwire.optim.settings import WarmupWire
from thinwire.zero.rank_checks import NormSketch, clip_of_norm
from thinwire.zero.replica import Replica
from thinwire.zero.saved_state import Count, Counters, Positive
from thinwire.zero.sharded_home import settings_digest


@dataclass(frozen=True)
class AdamSettings:
    """The hyperparameters of one parameter group."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: bool
    eps_inside_sqrt: bool

    @classmethod
    def of_group(cls, group: Mapping[str, Any]) -> AdamSettings:
        """Read them from an entry of `optimizer.param_groups`."""
        beta1, beta2 = group["betas"]
        return cls(
            float(group["lr"]),
            beta1,
            beta2,
            group.get("eps", 0.0),
            group["weight_decay"],
            group.get("bias_correction", True),
            group.get("eps_inside_sqrt", False),
        )

    def first_correction(self, step: int) -> float:
        """1 - β₁ᵗ, or 1 without bias correction."""
        return 1 - self.beta1**step if self.bias_correction else 1.0

    def second_correction(self, step: int) -> float:
        """1 - β₂ᵗ, or 1 without bias correction."""
        return 1 - self.beta2**step if self.bias_correction else 1.0


class Send(Enum):
    """The contents of a step on the wire."""

    EXACT = auto()  # gradients, averaged exactly
    COMPRESSED = auto()  # what `payload` makes of them, through the codec
    LOCAL = auto()  # nothing: every rank steps by its own payload
    SYNC = auto()  # what the local steps since the last sync, and this one, have gathered, through the codec


@dataclass
class Clock:
    """Where the parameters that entered together are, the same on every rank.

    `steps`: those applied; while one is applied it counts already. `frozen_at`: the step after which compression
    began; None before.
    """

    steps: int = 0
    frozen_at: int | None = None

    @property
    def frozen(self) -> bool:
        """Whether compression has begun."""
        return self.frozen_at is not None


ROUNDING = 1e-9
"""Of a learning rate: what differs by less is the same."""


class Peak:
    """The highest learning rate of each parameter group so far; `step`: the last that raised one of them."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.step = 0

    def raised_by(self, rates: Sequence[float]) -> bool:
        """Whether one of these is higher than it has been."""
        return any(now > before * (1 + ROUNDING) for now, before in zip(rates, self.rates, strict=False))

    def take(self, step: int, rates: Sequence[float]) -> None:
        """Take note of the rates that `step` has."""
        if len(rates) != len(self.rates):
            self.rates, self.step = list(rates), step
        elif self.raised_by(rates):
            self.rates, self.step = list(map(max, rates, self.rates)), step


@dataclass(eq=False)
class Parameters:
    """An optimizer's parameters by number, with the hyperparameters of their groups now.

    `group_of`: the number, in `groups`, of each one's group. `describe`: how an error message calls a parameter.
    `replica`: the ranks that together hold one, where it takes several.
    """

    parameters: list[Tensor]
    group_of: list[int]
    groups: Sequence[Mapping[str, Any]]
    _hyperparameters: type[AdamSettings]
    describe: Callable[[int], str]
    replica: Replica | None = None

    def settings(self, group: int) -> AdamSettings:
        """Read the hyperparameters of a parameter group."""
        return self._hyperparameters.of_group(self.groups[group])

    def mask(self, group: int) -> Tensor | None:
        """Return a parameter group's `exp_avg_mask`, if it has one."""
        mask: Tensor | None = self.groups[group].get("exp_avg_mask")
        return mask

    @property
    def shares(self) -> list[float]:
        """The part of a sum over a replica's elements that this rank counts of each one's."""
        return [1.0 if self.replica is None else self.replica.share(one) for one in self.parameters]

    def everywhere(self, holds: bool) -> bool:
        """Whether it holds on all ranks of the replica. Collective."""
        return holds if self.replica is None else self.replica.everywhere(holds, self.parameters[0].device)

    def of_replica(self, sums: Tensor) -> list[float]:
        """What each parameter with elements has, those of other stages included, of `sums`, fp64 [parameters], over the
        elements that are here. Collective over the replica."""
        if self.replica is not None:
            return self.replica.of_all(sums, self.parameters)
        return [number for number, one in zip(sums.tolist(), self.parameters, strict=True) if one.numel()]

    def rates(self) -> list[float]:
        """Read the learning rates of all parameter groups."""
        return [float(group["lr"]) for group in self.groups]


@dataclass(frozen=True)
class OwnedParameters:
    """Those with one owner each, and their shapes, by number. Owners get their gradients through the first of `codecs`,
    with `low_rank` directions beside it, and send their steps through the second."""

    shapes: Mapping[int, torch.Size]
    codecs: tuple[CodecName, CodecName]
    low_rank: int


@dataclass(frozen=True)
class Contribution:
    """One parameter for which a rank contributes: its number, its group's number and settings, and its state.

    `state`: by name, one-dimensional. `ranks`: how many ranks contribute.
    """

    parameter: int
    group: int
    settings: AdamSettings
    state: Mapping[str, Tensor]
    ranks: int


@dataclass(frozen=True)
class Members:
    """Parameters of one parameter group, or those cuts of them that a home works on: lists of equal length.

    `group`: the parameter group's number, and `settings` its hyperparameters now.
    `parameters`: their numbers. `weights`, fp32: what updates are applied to. `averages`, fp32: what the exchange
    brought; an algorithm may use their memory. `state`: by name, as the algorithm declares.
    """

    group: int
    settings: AdamSettings
    parameters: list[int]
    weights: list[Tensor]
    averages: list[Tensor]
    state: Mapping[str, list[Tensor]]

    def __getitem__(self, name: str) -> list[Tensor]:
        return self.state[name]


class MembersByGroup:
    """Collects members of several parameter groups one by one."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._groups: dict[int, Members] = {}

    def add(self, parameter: int, weight: Tensor, average: Tensor, state: Mapping[str, Tensor]) -> None:
        """Add one parameter, or a cut of one."""
        group = self._parameters.group_of[parameter]
        if group not in self._groups:
            of_group: dict[str, list[Any]] = {name: [] for name in state}
            self._groups[group] = Members(group, self._parameters.settings(group), [], [], [], of_group)
        members = self._groups[group]
        members.parameters.append(parameter)
        members.weights.append(weight)
        members.averages.append(average)
        for name, values in state.items():
            members.state[name].append(values)

    def in_order(self) -> list[Members]:
        """What was added, in the groups' order."""
        return [self._groups[number] for number in sorted(self._groups)]


@dataclass
class Step:
    """One step in flight, which all of its buckets share.

    `groups`: the parameter groups. `number`: of steps that were sent. `loss_scale`: what gradients are times, and
    `sent_scale`, what they were taken to be times when payloads left. `sketch`: where gradients are counted whose
    averaged norm is wanted before leg 2. `sketched`: that norm, before the host has it. `clip`: what they are
    multiplied by because of it, until then perhaps fp32 [] on an accelerator. `norm`: of the averaged gradient, times
    the loss scale; NaN if it was not found. `unplaced`: the parameters that lie in no bucket yet. `divide_first`: what
    gradients that are averaged exactly are divided by before they leave. `max_norm`: what the averaged gradient's norm
    is clipped to, 0 for none. `settings_sent`: by parameter group, those that payloads depend on. `frees_gradients`:
    let each gradient go once it is in the payload, so that it cannot be sent again. `flags`: what this rank's packets
    say besides.
    """

    groups: Sequence[Mapping[str, Any]]
    divide_first: float = 1.0
    max_norm: float = 0.0
    unplaced: list[int] = field(default_factory=list)
    number: int = 0
    loss_scale: float = 1.0
    sent_scale: float = 1.0
    sketch: NormSketch | None = None
    sketched: Tensor | None = None
    clip: float | Tensor = 1.0
    norm: float = math.nan
    settings_sent: dict[int, AdamSettings] = field(default_factory=dict)
    frees_gradients: bool = False
    flags: Flags = Flags.NONE
    _digest: int | None = None

    def begin(self) -> None:
        """Forget what the last step has found and sent."""
        self.clip = 1.0
        self.norm = math.nan
        self.sketched = self._digest = None
        self.settings_sent = {}

    def send_again(self) -> None:
        """Have payloads made anew, for the loss scale and the settings as they are now."""
        self.sent_scale = self.loss_scale
        self.settings_sent = {}
        self._digest = None

    @property
    def settings(self) -> int:
        """A digest of the hyperparameters as they are when the first bucket leaves, which all others send too."""
        if self._digest is None:
            self._digest = settings_digest(self.groups, self.number)
        return self._digest

    def clip_by_sketch(self) -> None:
        """Between the legs: clip by the averaged gradient's norm. Collective; on an accelerator nothing waits."""
        assert self.sketch is not None
        self.sketched = self.sketch.norm()
        self.clip = clip_of_norm(self.max_norm, self.sketched / self.sent_scale)


# Where they are, in a checkpoint


class _Part(BaseModel):
    """Of counters: values of these types and no others."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


# JSON makes texts of numbers that are keys.
_Number = Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=r"^\d{1,18}$")]


class _Rule(_Part):
    norms: dict[_Number, float | list[float]] = {}
    previous_rates: list[float] = []
    settled_since: Count | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if len(self.model_fields_set) not in (0, 3):
            raise ValueError("a rule that looks at the variance has norms, previous_rates and settled_since")
        return self


class _Layer(_Part):
    coefficient: float
    mass: float
    factor: float
    scale: float


class _Value(_Part):
    value: int | float | bool | list[int | float | bool]
    dtype: Literal["float32", "float64", "bfloat16", "float16", "int64", "int32", "bool"] | None
    beside_weight: bool


class _Begun(_Part):
    held: list[str]
    beside: dict[str, _Value]


class _Scalars(_Part):
    torch: dict[str, _Begun] = {}
    layers: dict[str, _Layer] = {}
    coefficients: dict[str, float] = {}
    variance_updates: Count = 0
    progress: dict[_Number, float] = {}


class _FreezeGroup(_Part):
    steps: Count
    frozen_at: Count | None
    rule: _Rule | None
    scalars: _Scalars
    buckets: list[list[str]] | None

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        if self.frozen_at is not None and self.frozen_at > self.steps:
            raise ValueError(f"it cannot be frozen since step {self.frozen_at} after {self.steps} steps")
        names = [*chain.from_iterable(self.buckets or ())]
        if len(set(names)) < len(names):
            raise ValueError("a parameter is in two buckets")
        return self


class AlgorithmCounters(Counters):
    """Of an optimizer in such a home. Checkpoints of earlier versions lack what has a default."""

    names: list[str]
    settings: dict[str, Any]
    nodes: list[int] | None
    step: Count
    loss_scale: Positive
    warmup_wire: WarmupWire | BlockCodecName = "fp32"
    freeze_groups: list[_FreezeGroup]
    shared_at: Count | None = None
    resynchronized_at: Count = 0
    claimed: Count = 0  # samples that an elastic job had given out
