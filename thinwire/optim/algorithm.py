"""The contract between an optimizer's arithmetic and the homes that its state lives in. An algorithm knows no rank,
bucket or codec; a home owns state, buckets, checkpoints and communication, and knows no algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, Protocol

from torch import Tensor

from thinwire.compress.kernels.buckets import PayloadForm, UpdateForm

__all__ = [
    "AdamSettings",
    "Agreement",
    "Algorithm",
    "Clock",
    "Contribution",
    "Form",
    "Keep",
    "LocalSteps",
    "Members",
    "MembersByGroup",
    "Send",
    "next_send",
    "variance_of",
]


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
    def of_group(cls, group: dict[str, Any]) -> AdamSettings:
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


@dataclass(frozen=True)
class Form:
    """A compressed step as data, which one kernel executes for a whole bucket (`compress/kernels/buckets.py`; in plain
    torch, `bucket_reference.py`).

        u = β₁ m + (1 - β₁) x,  x = g  payload "plain"       w = decay · w - rate · u      update "plain"
                                x = g / d  "divided"         w = decay · w - rate · u / d  "divided"
        u, 0 where d is infinite       "masked"

    What came back becomes m. `momentum`, `denominators`: the names of m and d, which is infinite where coordinates
    stay, and None if there is none. `payload`, `update`: None for what the algorithm does by itself.
    """

    momentum: str
    denominators: str | None
    payload: PayloadForm | None
    update: UpdateForm | None

    @property
    def packs(self) -> bool:
        """Whether sharded state is packed once it is frozen: momentum as signs, 1 / d in 8 bits, weights moved by
        `rates`."""
        return self.payload == "divided"


class Algorithm(ABC):
    """One optimizer's arithmetic on parameters that entered together; it may remember scalars between steps.

    `groups`: the parameters by parameter group, changed in place. `clock.steps` counts the step that is being applied.
    All is elementwise but for sums over whole parameters, which go through `agree`.
    """

    form: Form
    """Compressed steps, as far as they can be said as data."""

    state: ClassVar[Mapping[str, Keep]]
    """State from the first step on: fp32, zeros, but for denominators, which begin infinite."""

    frozen_state: ClassVar[Mapping[str, str | None]] = {}
    """State from the freeze on: for each name, the state whose memory it takes over; None for new zeros."""

    freezes: ClassVar[bool] = True
    """Whether there is a warmup of steps on exact averages, which a rule ends."""

    def scale(self, parameter: int) -> float:
        """What a parameter's gradient is multiplied by in compressed steps."""
        return 1.0

    def exact(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """In an EXACT step, take averaged gradients into the state, but for what `move` takes by itself."""

    def compressed(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """In a COMPRESSED or SYNC step, take what came back into the state; not called where the form moves weights."""

    @abstractmethod
    def move(self, groups: Sequence[Members], clock: Clock) -> None:
        """Move `weights` by the state, or by what was left in `averages`; not called where the form moves them."""

    def rates(self, parameter: int, settings: AdamSettings, clock: Clock) -> tuple[float, float]:
        """The form's rate, and what decay leaves of a parameter's weights."""
        raise NotImplementedError

    def freeze(
        self, groups: Sequence[Members], clock: Clock, agree: Agreement, precondition: Callable[[], None]
    ) -> None:
        """Turn the warmup's state, renamed and with zero variance where masks are zero, into the frozen stage's.

        `precondition` raises the form's denominators, as this has made them, to a hundredth of their parameter's mean,
        and divides the momentum by them as every rank will hold them.
        """

    def scalars(self, names: Sequence[str]) -> dict[str, Any]:
        """What a checkpoint must hold besides the state, as plain values; `names` of parameters by number."""
        return {}

    def load_scalars(self, saved: Mapping[str, Any], names: Sequence[str]) -> None:
        """Take over what `scalars` returned."""


class LocalSteps(ABC):
    """What an algorithm adds whose ranks step on their own between two syncs, by payloads of their own making."""

    own_state: ClassVar[frozenset[str]]
    """Of the frozen state, what differs from rank to rank."""

    published: ClassVar[tuple[str, ...]]
    """State of EVERY_RANK that owners write in `absorb_owned`; a sharded home then gathers it."""

    @abstractmethod
    def next_send(self, clock: Clock) -> Send:
        """What the step after `clock.steps` sends."""

    @abstractmethod
    def payload(self, gradient: Tensor | None, own: Contribution, clock: Clock, out: Tensor) -> None:
        """Write what one parameter contributes to the next step, if that is not EXACT, into `out`, fp32 [numel].

        `gradient`: fp32 [numel], may be `out` itself; None counts as zero.
        """

    @abstractmethod
    def payload_settings(self, settings: AdamSettings, clock: Clock) -> AdamSettings | None:
        """The settings that the next payload depends on, where a change after backward() has to be noticed."""

    @abstractmethod
    def absorb_owned(self, groups: Sequence[Members], clock: Clock) -> None:
        """In an EXACT step, take averaged gradients into the state that owners hold, and into what they publish."""

    @abstractmethod
    def settle(self, groups: Sequence[Members], clock: Clock) -> None:
        """After `absorb_owned`: do with what was published what takes whole parameters."""

    @abstractmethod
    def count_local(self, settings: Mapping[int, AdamSettings], clock: Clock) -> None:
        """Count a LOCAL or SYNC step, before it is absorbed; `settings` by parameter group."""

    @abstractmethod
    def absorb_local(self, groups: Sequence[Members], clock: Clock, finite: bool) -> None:
        """In a LOCAL step, take this rank's own payload, in `averages`, into its state; nothing new unless `finite`."""

    @abstractmethod
    def decay_common(self, groups: Sequence[Members], clock: Clock) -> None:
        """In a LOCAL step, decay the `weights` that all ranks have in common."""

    @abstractmethod
    def own_weight(self, common: Tensor, own: Contribution) -> Tensor:
        """What a parameter shows between two syncs, fp32 like `common`, the weight that all ranks have."""

    @abstractmethod
    def sync_payload(self, own: Contribution, out: Tensor) -> None:
        """Write into `out` what a sync between two steps sends for one parameter."""

    @abstractmethod
    def move_synced(self, groups: Sequence[Members], clock: Clock) -> None:
        """Move `weights` after a sync between two steps."""

    @abstractmethod
    def end_sync(self) -> None:
        """Note that all ranks hold the same weights."""

    @property
    @abstractmethod
    def in_sync(self) -> bool:
        """Whether they do."""

    @abstractmethod
    def decision(self) -> object:
        """Changes with every decision, but for the freeze, that all ranks have to take alike."""


def next_send(algorithm: Algorithm, clock: Clock) -> Send:
    """What the step after `clock.steps` sends."""
    if isinstance(algorithm, LocalSteps):
        return algorithm.next_send(clock)
    return Send.COMPRESSED if clock.frozen else Send.EXACT


def variance_of(algorithm: Algorithm) -> str | None:
    """The name of the state that becomes the form's denominators at the freeze; None if none does."""
    denominators = algorithm.form.denominators
    variance = algorithm.frozen_state.get(denominators or "")
    return None if variance == denominators else variance
