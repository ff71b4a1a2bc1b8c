"""The contract between an optimizer's arithmetic and the homes that its state lives in. An algorithm knows no rank,
bucket or codec; a home owns state, buckets, checkpoints and communication, and knows no algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.kernels.buckets import PayloadForm, UpdateForm
from thinwire.optim.step import AdamSettings, Clock, Parameters, Send
from thinwire.zero.norm_sketch import read_together


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

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._groups: dict[int, Members] = {}

    def add(self, parameter: int, weight: Tensor, average: Tensor, state: Mapping[str, Tensor]) -> None:
        """Add one parameter, or a cut of one."""
        group = self._parameters.group_of[parameter]
        if group not in self._groups:
            of_group: dict[str, list[Any]] = {name: [] for name in state}
            settings, mask = self._parameters.settings(group), self._parameters.mask(group)
            self._groups[group] = Members(group, settings, mask, [], [], [], of_group)
        members = self._groups[group]
        members.parameters.append(parameter)
        members.weights.append(weight)
        members.averages.append(average)
        for name, values in state.items():
            members.state[name].append(values)

    def in_order(self) -> list[Members]:
        """What was added, in the groups' order."""
        return [self._groups[number] for number in sorted(self._groups)]


class Keep(Enum):
    """Who holds a state, which has a value for each element."""

    EVERY_RANK = auto()
    OWNER = auto()  # where state is sharded, the owner of the shard; else every rank too


class Agreement:
    """Sums over whole parameters, and the greatest of their elements, the same bits on every rank.

    Norms are sums, which another CPU or number of threads adds up in another order: weights that must be the same bits
    on every rank cannot depend on each rank's own. Where every rank works on whole parameters, rank 0's numbers count.

    `settings`: of every parameter that takes part in the step, on any rank, by number.

    Args:
        parameters: the optimizer's, and `count`, how many there are sums for, the first ones.
        taking_part: the numbers of those that take part.
        shards: whether each rank works on cuts, of whose sums the sum counts.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Parameters,
        count: int,
        taking_part: Callable[[], list[int]],
        *,
        shards: bool,
    ) -> None:
        self._comm = comm
        self._parameters = parameters
        self._count = count
        self._taking_part = taking_part
        self._shards = shards

    @cached_property
    def settings(self) -> Mapping[int, AdamSettings]:
        """Read the hyperparameters of what takes part."""
        parameters = self._parameters
        of_group = [parameters.settings(group) for group in range(len(parameters.groups))]
        return {number: of_group[parameters.group_of[number]] for number in self._taking_part()}

    @property
    def numels(self) -> list[int]:
        """Elements of every parameter, whole, by number."""
        return [parameter.numel() for parameter in self._parameters.parameters[: self._count]]

    def zeros(self, kinds: int) -> Tensor:
        """Numbers to fill in: fp64 [parameters, kinds]."""
        return torch.zeros(self._count, kinds, dtype=torch.float64, device=self._parameters.parameters[0].device)

    def __call__(self, sums: Tensor, greatest: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Agree on `sums`, fp64 [parameters, kinds], and on `greatest`, fp64 [parameters], of what this rank works on.

        The results are on the CPU. Collective.
        """
        if not self._shards:
            last = torch.zeros_like(sums[:, :1]) if greatest is None else greatest[:, None]
            together = torch.cat([sums, last], dim=1)
            self._comm.broadcast(together)
            (together,) = read_together([together])
            return together[:, :-1], together[:, -1]
        adding = self._comm.all_reduce(sums, async_op=True)
        if greatest is None:
            greatest = sums.new_zeros(())
        else:
            greatest = greatest.contiguous()
            self._comm.all_reduce(greatest, "max")
        adding.wait()
        sums, greatest = read_together([sums, greatest])
        return sums, greatest


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

    scales: Mapping[int, float] = {}
    """What a parameter's gradient is multiplied by in compressed steps, by number; 1 if it is not there."""

    def exact(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """In an EXACT step, take averaged gradients into the state, but for what `move` takes by itself."""

    def compressed(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """In a COMPRESSED or SYNC step, take what came back into the state; not called where the form moves weights."""

    @abstractmethod
    def move(self, groups: Sequence[Members], clock: Clock) -> None:
        """Move `weights` by the state, or by what was left in `averages`; not called where the form moves them."""

    def rates(self, parameters: Sequence[int], settings: AdamSettings, clock: Clock) -> list[tuple[float, float]]:
        """The form's rate, and what decay leaves of a parameter's weights, of each of these of one group."""
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
