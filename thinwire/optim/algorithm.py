"""The contract between an optimizer's arithmetic and the homes that its state lives in. An algorithm knows no rank,
bucket or codec; a home owns state, buckets, checkpoints and communication, and knows no algorithm. Beside it the rules
by which a warmup ends."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.compress.kernels.buckets import PayloadForm, UpdateForm
from thinwire.compress.packet import read_together
from thinwire.optim.step import AdamSettings, Clock, Contribution, Members, Parameters, Send
from thinwire.zero.gradient_seal import whole_of


class Keep(Enum):
    """Who holds a state, which has a value for each element."""

    EVERY_RANK = auto()
    OWNER = auto()  # where state is sharded, the owner of the shard; else every rank too


@dataclass(eq=False)
class Agreement:
    """Sums over whole parameters, and the greatest of their elements, the same bits on every rank.

    Norms are sums, which another CPU or number of threads adds up in another order: weights that must be the same bits
    on every rank cannot depend on each rank's own. Where every rank works on whole parameters, rank 0's numbers count;
    with `shards` each works on cuts, of whose sums the sum counts. There are sums for the first `count` of
    `parameters`; `taking_part`: the numbers of those that take part in the step, on any rank.
    """

    comm: Communicator
    parameters: Parameters
    count: int
    taking_part: Callable[[], list[int]]
    shards: bool

    @cached_property
    def settings(self) -> Mapping[int, AdamSettings]:
        """Read the hyperparameters of what takes part, by number."""
        parameters = self.parameters
        of_group = [parameters.settings(group) for group in range(len(parameters.groups))]
        return {number: of_group[parameters.group_of[number]] for number in self.taking_part()}

    @property
    def numels(self) -> list[int]:
        """Elements of every parameter, whole, by number."""
        parameters = self.parameters.parameters[: self.count]
        return [whole_of(parameter).numel() for parameter in parameters]

    def zeros(self, kinds: int) -> Tensor:
        """Numbers to fill in: fp64 [parameters, kinds]."""
        return torch.zeros(self.count, kinds, dtype=torch.float64, device=self.parameters.parameters[0].device)

    def __call__(self, sums: Tensor, greatest: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Agree on `sums`, fp64 [parameters, kinds], and on `greatest`, fp64 [parameters], of what this rank works on.

        The results are on the CPU. Collective.
        """
        if not self.shards:
            last = torch.zeros_like(sums[:, :1]) if greatest is None else greatest[:, None]
            together = torch.cat([sums, last], dim=1)
            self.comm.broadcast(together)
            (together,) = read_together([together])
            return self._with_other_parts(together[:, :-1], together[:, -1])
        adding = self.comm.all_reduce(sums, async_op=True)
        if greatest is None:
            greatest = sums.new_zeros(())
        else:
            greatest = greatest.contiguous()
            self.comm.all_reduce(greatest, "max")
        adding.wait()
        sums, greatest = read_together([sums, greatest])
        return self._with_other_parts(sums, greatest)

    def _with_other_parts(self, sums: Tensor, greatest: Tensor) -> tuple[Tensor, Tensor]:
        """The same of parameters of which tensor parallelism has cut some."""
        replica, every = self.parameters.replica, self.parameters.parameters
        if replica is None:
            return sums, greatest
        shares = sums.new_tensor([replica.share_of_parts(one) for one in every[: self.count]])
        device = every[0].device
        return replica.add_parts(sums * shares[:, None], device), replica.add_parts(greatest, device, "max")


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
        """Whether sharded state is packed once it is frozen: momentum as packets, 1 / d in 8 bits, weights moved by
        `rates`."""
        return self.payload == "divided"


class Algorithm(ABC):
    """One optimizer's arithmetic on parameters that entered together; it may remember scalars between steps.

    `groups`: the parameters by parameter group, changed in place. `clock.steps` counts the step that is being applied.
    All is elementwise but for sums over whole parameters, which go through `agree`.
    """

    form: Form
    """Compressed steps, as far as they can be said as data."""

    state: Mapping[str, Keep]
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


# When to freeze. The decision uses what is the same on every rank; the ranks compare it at every look all the same,
# since a learning rate that differs would let one of them freeze alone


class FreezeRule:
    """Says after each warmup step whether it was the last one: here step `freeze_step`."""

    def __init__(self, freeze_step: int) -> None:
        self._freeze_step = freeze_step

    def reached(self, step: int, learning_rates: Sequence[float], variance_norms: Callable[[], list[float]]) -> bool:
        """Whether to freeze after warmup step `step` (from 1 on); `variance_norms` computes the 1-norm of each
        parameter's bias-corrected v when called, in the same order at every step."""
        return step >= self._freeze_step

    def looks_at(self, step: int) -> bool:
        """Whether the answer for `step` depends on more than the step: the ranks then compare theirs."""
        return False

    def state(self) -> dict[str, Any]:
        """Tell what a checkpoint must hold."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""


class SettledVariance(FreezeRule):
    """Freeze once the learning rate has stopped rising and the variance has settled, and stays settled for a while.

    Tang et al. 2021 (1-bit Adam) freeze when ‖v_{t-Δ}‖₁ / ‖v_t‖₁ ≥ 0.96 with Δ = 1/(1-β₂), after the learning-rate
    warmup. Here v is bias-corrected, Δ = min(1/(1-β₂), t/5), at least 20, so that a run of a few hundred steps can
    freeze too, and growth is looked at tensor by tensor: embeddings are most of the total, and hide that all others
    have begun to move. Settled is the variance where a quarter of the tensors at most grow faster than as t², by a
    factor of (t/(t-Δ))², 1.56 up to t = 5/(1-β₂) and less from then on, but never less than the paper's 1/0.96. Steps
    that are then frozen are too long by T/t at most for most tensors at the end T of the run, where the learning rate
    is low. And a tenth of the tensors at most grow faster than as t⁴: where a transformer leaves a plateau, queries and
    keys, a fifth of its tensors, grow by a hundred while all others hardly do. A variance that shrinks only makes steps
    come out smaller: the median tensor's may by 15% over Δ, which a run whose loss goes to zero needs, and no more,
    which is how gradients fall before a first plateau. All this has to hold for min(1/(1-β₂), max(50, t/5)) steps.
    Tensors that have had no gradient do not count.
    """

    _LEAST_GROWTH_ALLOWED = 1 / 0.96
    _FASTEST_PACE = 1.25  # t/(t-Δ) while Δ is a fifth of t
    _GROWTH_ALLOWED = ((0.75, 2), (0.9, 4))  # so many of the tensors, and the power of t
    _MOST_SHRINKAGE = 0.85
    _EVERY = 10  # steps between two looks at the variance, each a pass over v and a device synchronisation
    _SHORTEST_DELTA = 20
    _SHORTEST_HOLD = 50
    _PART = 5
    _KEPT_IN_DELTA = 8  # looks that are remembered: many tensors have a number each in every one

    def __init__(self, beta2: float) -> None:
        self._memory = 1.0 / (1.0 - beta2)
        self._norms: dict[int, list[float]] = {}
        self._previous_rates: list[float] = []
        self._settled_since: int | None = None

    @override
    def reached(self, step: int, learning_rates: Sequence[float], variance_norms: Callable[[], list[float]]) -> bool:
        rising = any(now > before for now, before in zip(learning_rates, self._previous_rates, strict=False))
        self._previous_rates = list(learning_rates)
        if rising:
            self._settled_since = None
        if step % self._EVERY:
            return False
        if not self._looks_settled(step, variance_norms()) or rising:
            self._settled_since = None
            return False
        if self._settled_since is None:
            self._settled_since = step
        return step - self._settled_since >= min(self._memory, max(self._SHORTEST_HOLD, step / self._PART))

    @override
    def looks_at(self, step: int) -> bool:
        return step % self._EVERY == 0

    def _looks_settled(self, step: int, norms: list[float]) -> bool:
        delta = min(self._memory, max(self._SHORTEST_DELTA, step / self._PART))
        if not self._norms or step - max(self._norms) >= delta / self._KEPT_IN_DELTA:
            self._norms[step] = norms
        earlier = [seen for seen in self._norms if seen <= step - delta]
        if not earlier:
            return False
        last = max(earlier)
        self._norms = {seen: values for seen, values in self._norms.items() if seen >= last}
        growth = _growths(self._norms[last], norms, delta / (step - last))
        if not growth:
            return False
        pace = min(self._FASTEST_PACE, step / (step - delta))
        return growth[(len(growth) - 1) // 2] >= self._MOST_SHRINKAGE and all(
            growth[math.ceil(part * len(growth)) - 1] <= max(self._LEAST_GROWTH_ALLOWED, pace**power)
            for part, power in self._GROWTH_ALLOWED
        )

    @override
    def state(self) -> dict[str, Any]:
        return {
            "norms": {step: list(values) for step, values in self._norms.items()},
            "previous_rates": list(self._previous_rates),
            "settled_since": self._settled_since,
        }

    @override
    def load(self, state: dict[str, Any]) -> None:
        """From a checkpoint with one number a look, the total, it begins to look anew."""
        old = any(not isinstance(values, list) for values in state["norms"].values())
        # JSON has made strings of the steps.
        self._norms = {} if old else {int(step): list(values) for step, values in state["norms"].items()}
        self._previous_rates = list(state["previous_rates"])
        self._settled_since = None if old else state["settled_since"]


def _growths(before: list[float], now: list[float], exponent: float) -> list[float]:
    """By what each tensor's norm has grown, to the power of `exponent`, in ascending order; without those that are
    zero still."""
    if len(before) != len(now):
        return []
    pairs = [(one, other) for one, other in zip(before, now, strict=True) if one or other]
    return sorted((other / one) ** exponent if one else math.inf for one, other in pairs)


FreezeStep = int | Literal["auto"]
"""The step after which the warmup ends; "auto" once the variance has settled."""


def make_freeze_rule(freeze_step: FreezeStep, beta2: float) -> FreezeRule:
    """The rule for `freeze_step`; raises ValueError unless it is "auto" or an int of at least 1."""
    if freeze_step == "auto":
        return SettledVariance(beta2)
    if isinstance(freeze_step, bool) or not isinstance(freeze_step, int) or freeze_step < 1:
        raise ValueError(
            f"freeze_step must be 'auto' or a whole number of warmup steps of at least 1, got {freeze_step!r}"
        )
    return FreezeRule(freeze_step)


def variance_norm(variance: Tensor, settings: AdamSettings, step: int) -> Tensor:
    """The 1-norm of the bias-corrected variance, a float64 scalar, summed in float64."""
    return variance.sum(dtype=torch.float64) / (1 - settings.beta2**step)
