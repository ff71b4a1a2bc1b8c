"""The state and the weights of a freeze group, wherever they lie, and how they move; every home has storages of its
own."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.optim.algorithm import Agreement, Form, LocalSteps
from thinwire.optim.bucket import Bucket, Shared, place_of
from thinwire.optim.step import Clock, Members, MembersByGroup, Parameters
from thinwire.zero import BucketLayout, Slot
from thinwire.zero.gradients import BucketGradients, BucketTransport
from thinwire.zero.master_weights import Run, runs_in
from thinwire.zero.saved_state import SliceSource, mean_over_ranks

Change = Callable[[Sequence[Members], Clock], None]
"""Changes the weights of members in place."""


class Storage(ABC):
    """The state and the weights behind some `buckets`, those that all ranks have in common.

    `transports`: what sends the gradients of the step in flight. `gradients`: those of them that leave averages of
    gradients on their owners; none if buckets do all of it. `shards`: whether members are the cuts that a rank
    owns, so that what is found for whole parameters adds up over ranks.
    """

    gradients: Sequence[BucketGradients] = ()
    shards: ClassVar[bool] = False
    shards_state: ClassVar[bool] = False
    """Whether state that the algorithm has its owner keep is of this rank's shard only."""
    shapes: ClassVar[bool] = False
    """Whether members have their parameters' shapes."""

    def __init__(self, shared: Shared, layouts: Mapping[int, BucketLayout]) -> None:
        """`layouts`: of its buckets, by their numbers."""
        self.shared = shared
        self._parameters, self._algorithm = shared.parameters, shared.algorithm
        self._clock, self._wire = shared.clock, shared.wire
        self.buckets = [self._make_bucket(index, layout) for index, layout in layouts.items()]
        self.transports: Sequence[BucketTransport] = self.buckets

    def _make_bucket(self, index: int, layout: BucketLayout) -> Bucket:
        state = {name: self.new_state(name, index, layout) for name in self._algorithm.state}
        if (denominators := self._algorithm.form.denominators) in state:
            state[denominators][: layout.numel].fill_(math.inf)
        return Bucket(index, layout, self.shared, state=state, shards_state=self.shards_state)

    # State

    @abstractmethod
    def new_state(self, name: str, bucket: int, layout: BucketLayout) -> Tensor:
        """Make state of a bucket: zeros."""

    def begin_frozen_state(self) -> None:
        """Have the frozen stage's state, in the memory of the warmup's where the algorithm says so; to be filled."""
        for bucket in self.buckets:
            before = bucket.state
            bucket.state = {
                new: self.new_state(new, bucket.index, bucket.layout) if old is None else before[old].to(bucket.device)
                for new, old in self._algorithm.frozen_state.items()
            }

    def hold_masked(self, name: str | None, value: float) -> None:
        """Fill the state `name`, if it is there, with `value` where the parameter groups' masks are zero."""
        for bucket in self.buckets:
            if (values := bucket.whole_state.get(name or "")) is not None:
                fill_masked(self._parameters, values, runs_in(bucket.layout, slice(0, bucket.layout.numel)), value)

    def precondition(self) -> None:
        """Raise each parameter's smallest denominators, and divide the momentum by them."""
        form = self._algorithm.form
        assert form.denominators is not None
        for members in self.members():
            raise_smallest(members[form.denominators])
            torch._foreach_div_(members[form.momentum], members[form.denominators])

    def begin_compression(self, *, anew: bool = True) -> None:
        """Be ready for compressed steps, without residuals from before; or where a checkpoint goes on, not `anew`."""
        for bucket in self.buckets:
            bucket.find_zero_variance(anew=anew)

    # Members

    def weight(self, bucket: Bucket, slot: Slot) -> Tensor:
        """Return what `members` have for a parameter's weight; by default nothing that state could depend on."""
        return bucket.exchange.payload[place_of(slot)]

    def members(
        self, absent: Collection[int] = (), *, trained: bool = False, state_only: bool = False
    ) -> list[Members]:
        """The parameters with elements, but `absent` ones, and with `trained` only those that require gradients.

        `state_only`: weights and averages are not looked at.
        """
        members = MembersByGroup(self._parameters)
        for bucket in self.buckets:
            payload, state = bucket.exchange.payload, bucket.whole_state
            for slot in slots_with_elements(bucket, absent):
                if trained and not self._parameters.parameters[slot.parameter].requires_grad:
                    continue
                views = {name: self._view(values, slot) for name, values in state.items()}
                members.add(slot.parameter, self.weight(bucket, slot), self._view(payload, slot), views)
        return members.in_order()

    # A step

    def average(self, bucket: int) -> Tensor | None:
        """The averaged gradient that has arrived, of a whole bucket or of this rank's shard; None in no EXACT step."""
        return self.buckets[bucket].average()

    def absorb(self, local: LocalSteps, groups: Sequence[Members], absent: Collection[int], agree: Agreement) -> None:
        """Have an algorithm with local steps take averages into the state, in an EXACT step."""
        local.absorb_owned(groups, self._clock)
        self.hold_masked(self._algorithm.form.denominators, math.inf)
        self._algorithm.exact(groups, self._clock, agree)
        local.settle(groups, self._clock)

    @abstractmethod
    def change(self, change: Change, groups: Sequence[Members]) -> None:
        """Have the common weights of `groups` changed, the same bits on every rank."""

    @abstractmethod
    def receive_and_move(self, bucket: Bucket) -> None:
        """Take what a COMPRESSED step brought, and move the weights as the algorithm's form says."""

    def show_common(self) -> None:
        """Write the common weights into the parameters."""

    def common(self, bucket: Bucket, slot: Slot) -> Tensor:
        """Return a parameter's common weights, flat; this and the next three are for local steps."""
        raise NotImplementedError

    def show(self, bucket: Bucket, slot: Slot, weight: Tensor) -> None:
        """Write a parameter's own weights, flat fp32, into it."""
        raise NotImplementedError

    def keep_common(self) -> None:
        """Keep the common weights where they are whatever parameters show."""
        raise NotImplementedError

    @abstractmethod
    def take_over_written(self, in_sync: bool) -> list[tuple[Bucket, Slot]]:
        """Take over what other code has written into parameters; without `in_sync` say where instead."""

    def holds(self, bucket: Bucket, slot: Slot, weight: Tensor) -> bool:
        """Whether a parameter shows these weights, flat fp32; then that is what was shown."""
        raise NotImplementedError

    def weights_rewritten(self, bucket: int) -> None:
        """Note that a bucket's parameters were written, and that their master weights have followed."""

    # Checkpoints

    @abstractmethod
    def saved(self, bucket: Bucket, run: Run, own: bool) -> dict[str, Tensor]:
        """The common `weight`, and the `master` where there is one, of a run of a parameter in this rank's shard.

        `own`: whether parameters show the ranks' own weights.
        """

    def saved_state(self, bucket: Bucket, own: slice) -> dict[str, Tensor]:
        """This rank's shard, the elements `own`, of state that all ranks have in common, or their owners: [shard]."""
        whole, common = bucket.whole_state, _common_state(self.shared, bucket)
        return {name: whole[name][own] if name in whole else bucket.state[name] for name in common}

    def load_state(
        self, bucket: Bucket, names: Sequence[str], source: SliceSource, ranks: Sequence[int] | None
    ) -> None:
        """Take state over; what ranks do not have in common is the mean of those of `ranks`, if these can be had."""
        read_plain, common = as_plain(source, self._algorithm.form), _common_state(self.shared, bucket)
        for kind, values in bucket.whole_state.items():
            for slot in slots_with_elements(bucket):
                name = names[slot.parameter]
                own = kind not in common and ranks is not None
                read = mean_over_ranks(source, f"{kind}.{name}", ranks or ()) if own else None
                values[place_of(slot)].copy_(read_plain(kind, name, 0, slot.numel) if read is None else read)
        self._load_owned(bucket, names, source)

    def _load_owned(self, bucket: Bucket, names: Sequence[str], source: SliceSource) -> None:
        first = self._wire.comm.rank * bucket.layout.shard
        for kind in bucket.owned:
            for run in runs_in(bucket.layout, slice(first, first + bucket.layout.shard)):
                bucket.state[kind][run.place].copy_(source.read(kind, names[run.parameter], run.start, run.numel))

    def _view(self, values: Tensor, slot: Slot) -> Tensor:
        shape = self._parameters.parameters[slot.parameter].shape
        return values[place_of(slot)].view(shape) if self.shapes else values[place_of(slot)]


def _common_state(shared: Shared, bucket: Bucket) -> list[str]:
    """The state that every rank has alike, or its owner alone."""
    local, frozen = shared.algorithm, shared.clock.frozen_at is not None
    own = local.own_state if frozen and isinstance(local, LocalSteps) else frozenset()
    return [kind for kind in bucket.state if kind not in own]


def fill_masked(parameters: Parameters, values: Tensor, runs: Iterable[Run], value: float) -> None:
    """Fill these runs' places in `values` where their parameter's `exp_avg_mask` is zero."""
    for run in runs:
        mask = parameters.mask(parameters.group_of[run.parameter])
        if mask is not None:
            whole = shaped_mask(mask, parameters.parameters[run.parameter].shape).reshape(-1)
            of_run = whole[run.start : run.start + run.numel].to(values.device)
            values[run.place].masked_fill_(of_run == 0, value)


def counted_bytes(
    weights: Iterable[Tensor], master_weights: Iterable[Tensor], states: Iterable[Tensor], buckets: Iterable[Bucket]
) -> dict[str, float]:
    """Count a rank's bytes by what they are for, as there is no published formula; gradients take what weights do."""
    exchanges = [bucket.compressed for bucket in buckets]
    residuals = [one for ex in exchanges for one in (ex.worker_residual, ex.owner_residual) if one is not None]
    of_weights = float(sum(one.nbytes for one in weights))
    return {
        "weights": of_weights,
        "master weights": float(sum(one.nbytes for one in master_weights)),
        "gradients": of_weights,
        "residuals": float(sum(one.nbytes for one in residuals)),
        "optimizer state": float(sum(one.nbytes for one in states)),
    }


def slots_with_elements(bucket: Bucket, absent: Collection[int] = ()) -> list[Slot]:
    """A bucket's parameters with elements, but `absent` ones."""
    return [slot for slot in bucket.layout.slots if slot.numel and slot.parameter not in absent]


# Denominators of the frozen stage, and their inverses in 8 bits an element, so that every worker can hold all of them
# although the variance is sharded

SMALLEST_OF_MEAN = 0.01
"""The least frozen denominator of a parameter, as a part of their mean."""

LEVELS = 256
"""Code 0 stands for 0, a coordinate that does not move; codes 1 to 255 are evenly spaced logarithms."""


def table(low: Tensor, high: Tensor) -> Tensor:
    """The values of all codes for each row's range: fp32 [rows, 256] from `low` and `high`, [rows], both above 0.

    The relative step is (high/low)^(1/254): 3.7% for a range of ten thousand, so that a value is off by 1.9% at most.
    """
    low, high = low.double(), high.double()
    fraction = torch.arange(LEVELS - 1, dtype=torch.float64, device=low.device) / (LEVELS - 2)
    logarithms = low.log()[:, None] + fraction * (high / low).log()[:, None]
    return torch.cat([torch.zeros_like(low)[:, None], logarithms.exp()], dim=1).float()


def quantize(values: Tensor, low: float, high: float) -> Tensor:
    """The codes, uint8, of `values`, fp32, which are 0 or lie from `low` to `high`; the nearest logarithm."""
    scale = (LEVELS - 2) / max(torch.tensor(high / low, dtype=torch.float64).log().item(), 1e-12)
    steps = (values / low).clamp_(min=1e-30).log_().mul_(scale).round_().clamp_(0, LEVELS - 2)
    return torch.where(values > 0, steps + 1, 0.0).to(torch.uint8)


def raise_smallest(denominators: list[Tensor]) -> None:
    """Raise each tensor's denominators, in place, to a hundredth of their mean; those that are infinite do not count.

    A frozen variance next to nothing, of a unit that was asleep until the freeze, would otherwise turn the first
    gradient after it into an update a million times the others', and with it the scale of its whole block.
    """
    for denominator in denominators:
        finite = torch.isfinite(denominator)
        mean = torch.where(finite, denominator, 0.0).sum() / finite.sum().clamp(min=1)
        denominator.clamp_(min=SMALLEST_OF_MEAN * mean)


def shaped_mask(mask: Tensor, shape: torch.Size) -> Tensor:
    """`mask` in a parameter's shape: it broadcasts to it, or is flat."""
    return mask.reshape(shape) if mask.numel() == shape.numel() else mask.expand(shape)


# Saved state that crosses between homes: packed as plain, plain as packed

PACKED_MOMENTUM, PACKED_PRECONDITIONER = "momentum", "preconditioner"
PRECONDITIONER_LOW, PRECONDITIONER_HIGH = "scalar.preconditioner_low", "scalar.preconditioner_high"


Read = Callable[[str, str, int, int], Tensor]
"""Gives values of a kind, of a parameter by its name, from an element on, as many as are asked for."""


def as_plain(source: SliceSource, form: Form) -> Read:
    """Read `source`, with the form's momentum and denominators where it has packed ones."""
    if PACKED_PRECONDITIONER not in source.kinds():
        return source.read

    def read(kind: str, name: str, start: int, numel: int) -> Tensor:
        if kind == form.denominators:
            codes = source.read(PACKED_PRECONDITIONER, name, start, numel)
            low, high = (source.read(one, name, 0, 1) for one in (PRECONDITIONER_LOW, PRECONDITIONER_HIGH))
            return table(low, high)[0][codes.int()].reciprocal_()
        return source.read(PACKED_MOMENTUM if kind == form.momentum else kind, name, start, numel)

    return read


def as_packed(source: SliceSource, form: Form) -> Read:
    """Read `source`, with packed momentum and preconditioner where it has plain ones; the latter whole, before its
    range."""
    if PACKED_PRECONDITIONER in source.kinds():
        return source.read
    ranges: dict[str, tuple[float, float]] = {}

    def read(kind: str, name: str, start: int, numel: int) -> Tensor:
        if kind in (PRECONDITIONER_LOW, PRECONDITIONER_HIGH):
            return torch.tensor([ranges[name][kind == PRECONDITIONER_HIGH]])
        if kind != PACKED_PRECONDITIONER:
            return source.read(form.momentum if kind == PACKED_MOMENTUM else kind, name, start, numel)
        inverse = 1 / source.read(form.denominators or "", name, start, numel)
        moving = inverse[inverse > 0]
        low, high = ranges[name] = (float(moving.min()), float(moving.max())) if len(moving) else (1.0, 1.0)
        return quantize(inverse, low, high)

    return read
