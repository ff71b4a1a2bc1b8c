"""The contract between an optimizer's arithmetic and the homes that its state lives in. An algorithm knows no rank,
bucket or codec; a home owns state, buckets, checkpoints and communication, and knows no algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, Protocol

from torch import Tensor

from thinwire.optim.form import MoveRule, PayloadRule
from thinwire.optim.formulas import AdamSettings

__all__ = ["Agreement", "Algorithm", "Clock", "Contribution", "Keep", "Linear", "Members", "MembersByGroup", "Send"]


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

    `group`: the parameter group's number, and `settings` its hyperparameters now. `mask`: its `exp_avg_mask`.
    `parameters`: their numbers. `weights`, fp32: what updates are applied to. `averages`, fp32: what the exchange
    brought; an algorithm may use their memory. `state`: by name, as the algorithm declares.
    """

    group: int
    settings: AdamSettings
    mask: Tensor | None
    parameters: list[int]
    weights: list[Tensor]
    averages: list[Tensor]
    state: Mapping[str, list[Tensor]]

    def __getitem__(self, name: str) -> list[Tensor]:
        return self.state[name]


class MembersByGroup:
    """Collects members of several parameter groups one by one."""

    def __init__(
        self, settings: Callable[[int], AdamSettings], mask: Callable[[int], Tensor | None] = lambda group: None
    ) -> None:
        self._settings = settings
        self._mask = mask
        self._groups: dict[int, Members] = {}

    def add(self, group: int, parameter: int, weight: Tensor, average: Tensor, state: Mapping[str, Tensor]) -> None:
        """Add one parameter, or a cut of one."""
        if group not in self._groups:
            of_group: dict[str, list[Any]] = {name: [] for name in state}
            self._groups[group] = Members(group, self._settings(group), self._mask(group), [], [], [], of_group)
        members = self._groups[group]
        members.parameters.append(parameter)
        members.weights.append(weight)
        members.averages.append(average)
        for name, values in state.items():
            members.state[name].append(values)

    def in_order(self) -> list[Members]:
        """What was added, in the groups' order."""
        return [self._groups[number] for number in sorted(self._groups)]


class Send(Enum):
    """What a step puts on the wire."""

    EXACT = auto()  # gradients, averaged exactly
    COMPRESSED = auto()  # what `payload` makes of them, through the codec
    LOCAL = auto()  # nothing: every rank steps by its own payload
    SYNC = auto()  # what the local steps since the last sync, and this one, have gathered, through the codec


class Keep(Enum):
    """Who holds a state, which has a value for each element."""

    EVERY_RANK = auto()
    OWNER = auto()  # where state is sharded, the owner of the shard; else every rank too


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


class Agreement(Protocol):
    """How ranks agree on numbers that each has found for what it works on.

    `settings`: of every parameter that takes part in the step, on any rank, by number. `numels`: elements of every
    parameter, whole, by number.
    """

    @property
    def settings(self) -> Mapping[int, AdamSettings]:
        """See the class."""

    @property
    def numels(self) -> Sequence[int]:
        """See the class."""

    def zeros(self, kinds: int) -> Tensor:
        """Numbers to fill in: fp64 [parameters, kinds]."""

    def __call__(self, sums: Tensor, greatest: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`sums`, fp64 [parameters, kinds], and `greatest`, fp64 [parameters], of whole parameters, on the CPU.

        Given are those of the cuts that this rank works on. The results are the same bits on every rank. Collective.
        """


class Algorithm(ABC):
    """One optimizer's arithmetic on parameters that entered together; it may remember scalars between steps.

    `groups`: the parameters by parameter group, changed in place. All is elementwise but for sums over whole
    parameters, which go through `agree`, and `settle`.
    """

    state: ClassVar[Mapping[str, Keep]]
    """State from the first step on: fp32, zeros but for `fills`."""

    fills: ClassVar[Mapping[str, float]] = {}
    """What a state begins with."""

    frozen_state: ClassVar[Mapping[str, str | None]] = {}
    """State from the freeze on: for each name, the state whose memory it takes over; None for new zeros."""

    own_state: ClassVar[frozenset[str]] = frozenset()
    """Of the frozen state, what differs from rank to rank, by local steps."""

    published: ClassVar[tuple[str, ...]] = ()
    """State of EVERY_RANK that owners write in `absorb_owned`; a sharded home then gathers it."""

    received_as: ClassVar[str | None] = None
    """The state that what a compressed step brought is written into; None for `averages`."""

    freezes: ClassVar[bool] = True
    """Whether there is a warmup of steps on exact averages, which a rule ends."""

    local_steps: ClassVar[bool] = False
    """Whether steps can be LOCAL and SYNC."""

    settings_class: ClassVar[type[AdamSettings]] = AdamSettings

    payload_rule: PayloadRule | None = None
    """What `payload` writes in COMPRESSED steps, where one kernel can do it; None for a payload of its own."""

    move_rule: MoveRule | None = None
    """What `absorb_compressed` and `move` do in COMPRESSED steps, where one kernel can do it."""

    def next_send(self, clock: Clock) -> Send:
        """What the step after `clock.steps` sends."""
        return Send.COMPRESSED if clock.frozen else Send.EXACT

    # What a rank contributes

    @abstractmethod
    def payload(self, gradient: Tensor | None, own: Contribution, clock: Clock, out: Tensor) -> None:
        """Write what one parameter contributes to the next step, if that is not EXACT, into `out`, fp32 [numel].

        `gradient`: fp32 [numel], may be `out` itself; None counts as zero.
        """

    def scale(self, parameter: int) -> float:
        """What a parameter's gradient is multiplied by in steps that are not EXACT."""
        return 1.0

    def payload_settings(self, settings: AdamSettings, clock: Clock) -> AdamSettings | None:
        """The settings that the next payload depends on, where a change after backward() has to be noticed."""
        return None

    # What a step does with what came back; `clock.steps` counts it

    def absorb_owned(self, groups: Sequence[Members], clock: Clock) -> None:
        """In an EXACT step, take averaged gradients into the state that owners hold."""

    @abstractmethod
    def absorb_exact(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """In an EXACT step, take averaged gradients into the state, but for what `move` takes by itself."""

    def settle(self, groups: Sequence[Members], clock: Clock) -> None:
        """At the end of an EXACT step's absorbing: what takes whole parameters."""

    @abstractmethod
    def absorb_compressed(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """In a COMPRESSED or SYNC step, take what came back into the state."""

    def absorb_local(self, groups: Sequence[Members], clock: Clock, finite: bool) -> None:
        """In a LOCAL step, take this rank's own payload, in `averages`, into its state; nothing new unless `finite`."""

    def freeze(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """Turn the warmup's state, renamed already, into the frozen stage's."""

    @abstractmethod
    def move(self, groups: Sequence[Members], clock: Clock) -> None:
        """Move `weights` by the state, or by what absorbing has left in `averages`."""

    def rates(self, parameter: int, settings: AdamSettings, clock: Clock) -> tuple[float, float]:
        """What u, that came back, is multiplied by to move a parameter, and what decay leaves of its weights; the step
        is counted. For those with a `move_rule`, and `Linear` ones."""
        raise NotImplementedError

    # Local steps

    def count_local(self, settings: Mapping[int, AdamSettings], clock: Clock) -> None:
        """Count a LOCAL or SYNC step, before it is absorbed; `settings` by parameter group."""

    def decay_common(self, groups: Sequence[Members], clock: Clock) -> None:
        """In a LOCAL step, decay the `weights` that all ranks have in common."""

    def own_weight(self, common: Tensor, own: Contribution) -> Tensor:
        """What a parameter shows between two syncs, fp32 like `common`, the weight that all ranks have."""
        return common

    def begin_meeting(self, own: Contribution, out: Tensor) -> None:
        """Write into `out` what a sync between two steps sends for one parameter."""

    def meet(self, groups: Sequence[Members], clock: Clock) -> None:
        """Move `weights` after a sync between two steps."""

    def end_sync(self) -> None:
        """Note that all ranks hold the same weights."""

    @property
    def in_sync(self) -> bool:
        """Whether they do."""
        return True

    # What else a home asks

    def zero_variance(self, state: Mapping[str, Tensor]) -> Tensor | None:
        """A mask of the coordinates that do not move; None where there can be none."""
        return None

    def hold_masked(self, state: Mapping[str, Tensor], mask: Tensor) -> None:
        """Hold one parameter where its `mask` is zero, in state that a checkpoint brought, whichever mask it had."""

    def decision(self) -> object:
        """Changes with every decision, but for the freeze, that all ranks have to take alike."""
        return None

    def scalars(self, names: Sequence[str]) -> dict[str, Any]:
        """What a checkpoint must hold besides the state, as plain values; `names` of parameters by number."""
        return {}

    def load_scalars(self, saved: Mapping[str, Any], names: Sequence[str]) -> None:
        """Take over what `scalars` returned."""


class Linear(Algorithm):
    """An algorithm whose frozen stage the packed home serves: u ← β₁ u + (1 - β₁) g / (√v̂ + ε), w -= rate · u.

    There u is what everybody decoded, kept as signs, and 1 / (√v̂ + ε) is a constant that owners publish in 8 bits.
    """

    def scale_momenta(self, groups: Sequence[Members], agree: Agreement) -> None:
        """Give u, in `exp_avg`, another scale for each parameter at the freeze."""

    def begin_frozen(self, groups: Sequence[Members], clock: Clock) -> None:
        """Fill what `frozen_state` adds, besides momentum and denominators, at the freeze."""

    follows_variance: ClassVar[bool] = False
    """Whether `absorb_compressed` needs u before and after, so that it has to be decoded."""
