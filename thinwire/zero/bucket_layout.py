"""Lay parameters out in buckets, and say which rank owns which shard of them.
Kept apart from tensors so that the arithmetic can be tested exhaustively."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from thinwire.compress.packet_layout import shard_numel

_BUCKETS = 8
_MOST_PADDING = 1.25  # elements of a bucket of whole parameters for one that belongs to a parameter
_SMALLEST_BUCKET_BYTES = 4 << 20
LARGEST_BUCKET_BYTES = 16 << 20
"""Of the buckets that are cut by default: all of a sharded model's."""


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket: elements `offset` to `offset + numel`."""

    parameter: int
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketLayout:
    """A flat run of whole parameters, padded so that each of `world_size` shards is whole blocks."""

    slots: tuple[Slot, ...]
    world_size: int
    block_size: int
    whole: ClassVar[bool] = False
    """Whether every parameter has one owner."""

    @cached_property
    def numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def shard(self) -> int:
        """Elements of one rank's shard, padding included."""
        return shard_numel(self.numel, self.world_size, self.block_size)

    @property
    def padded_numel(self) -> int:
        """Elements of the whole bucket, padding included."""
        return self.shard * self.world_size

    @property
    def gaps(self) -> list[slice]:
        """The elements that belong to no parameter."""
        return [slice(self.numel, self.padded_numel)]

    @property
    def filled(self) -> list[int]:
        """Elements of each shard, in whole blocks, up to the last that belongs to a parameter."""
        ends = [0] * self.world_size
        for slot in self.slots:
            end = slot.offset + slot.numel
            for owner in range(slot.offset // self.shard, -(-end // self.shard)):
                ends[owner] = max(ends[owner], min(end - owner * self.shard, self.shard))
        return [-(-end // self.block_size) * self.block_size for end in ends]


@dataclass(frozen=True)
class WholeLayout(BucketLayout):
    """One in which every parameter lies in one shard, of `own` elements; what no parameter fills is between shards."""

    own: int
    whole: ClassVar[bool] = True

    @property
    def numel(self) -> int:
        """The whole bucket: parameters and gaps alternate."""
        return self.padded_numel

    @property
    def shard(self) -> int:
        """Elements of one rank's shard, padding included."""
        return self.own

    @property
    def gaps(self) -> list[slice]:
        """The elements that belong to no parameter."""
        found, end = [], 0
        for slot in sorted(self.slots, key=lambda one: (one.offset, one.numel)):
            if slot.offset > end:
                found.append(slice(end, slot.offset))
            end = slot.offset + slot.numel
        return [*found, slice(end, self.padded_numel)]


def bucket_numel(bucket_bytes: int | None, numel: int, itemsize: int) -> int:
    """Elements of a bucket of `bucket_bytes`, of a model with `numel` in all, each of `itemsize` bytes.

    None is an eighth of the model, from 4 to 16 MiB: one bucket in eight is left when backward ends, with nothing to
    hide behind, and every bucket is large enough that latency, and what a bucket costs whatever its size, do not count:
    4 MiB of fp32 are 128 KiB of signs, a millisecond at 1 Gb/s, where a bucket costs a third of that in calls.
    """
    if bucket_bytes is None:
        bucket_bytes = min(LARGEST_BUCKET_BYTES, max(_SMALLEST_BUCKET_BYTES, -(-numel // _BUCKETS) * itemsize))
    return max(1, bucket_bytes // itemsize)


def partition(
    numels: Sequence[int], order: Sequence[int], *, world_size: int, block_size: int, bucket_numel: int
) -> list[BucketLayout]:
    """Cut the parameters `order` (indices into `numels`) into buckets of about `bucket_numel` elements.

    A parameter is never split: one larger than `bucket_numel` makes a bucket of its own size. Every parameter
    of `order` lies in exactly one bucket, in the given order, without gaps.
    """
    if bucket_numel < 1:
        raise ValueError(f"bucket_numel must be at least 1, got {bucket_numel}")
    layouts: list[BucketLayout] = []
    slots: list[Slot] = []
    offset = 0
    for parameter in order:
        if slots and offset + numels[parameter] > bucket_numel:
            layouts.append(BucketLayout(tuple(slots), world_size, block_size))
            slots, offset = [], 0
        slots.append(Slot(parameter, offset, numels[parameter]))
        offset += numels[parameter]
    if slots:
        layouts.append(BucketLayout(tuple(slots), world_size, block_size))
    return layouts


def partition_whole(
    numels: Sequence[int],
    order: Sequence[int],
    *,
    world_size: int,
    block_size: int,
    bucket_numel: int,
    given: list[int] | None = None,
) -> list[WholeLayout]:
    """Cut the parameters `order` into buckets of at least `bucket_numel` elements, each parameter owned by one rank.

    A bucket goes on until its owners' shares are about equal, so that none waits long for another, and little memory is
    padding; what is left over joins as many of the last buckets as it takes. Who has least of the buckets before gets
    the largest share. Owners are the same wherever this is computed. `given`: elements that each owner has of other
    buckets, to which these are added.
    """
    if bucket_numel < 1:
        raise ValueError(f"bucket_numel must be at least 1, got {bucket_numel}")
    members: list[list[int]] = [[]]
    for parameter in order:
        if members[-1] and _is_full([numels[one] for one in members[-1]], world_size, bucket_numel):
            members.append([])
        members[-1].append(parameter)
    while len(members) > 1 and not _is_full([numels[one] for one in members[-1]], world_size, 1):
        rest = members.pop()
        members[-1] += rest
    given = [0] * world_size if given is None else given
    return [_share_out(numels, one, given, block_size) for one in members if one]


def _is_full(numels: Sequence[int], world_size: int, least: int) -> bool:
    total = sum(numels)
    if total < least or world_size * max(numels) > _MOST_PADDING * total:
        return False
    return world_size * max(load for load, _ in _loads(numels, world_size)) <= _MOST_PADDING * total


def _loads(numels: Sequence[int], world_size: int) -> list[tuple[int, list[int]]]:
    """(Elements, which of `numels`) of each owner: the largest first, each to whom has least."""
    loads = [0] * world_size
    owned: list[list[int]] = [[] for _ in loads]
    for number in sorted(range(len(numels)), key=lambda one: (-numels[one], one)):
        owner = min(range(world_size), key=lambda rank: (loads[rank], rank))
        loads[owner] += numels[number]
        owned[owner].append(number)
    return [(load, sorted(numbers)) for load, numbers in zip(loads, owned, strict=True)]


def _share_out(numels: Sequence[int], members: Sequence[int], given: list[int], block_size: int) -> WholeLayout:
    """Lay a bucket out for owners who have been `given` so many elements before, to which theirs of this are added."""
    loads = sorted(_loads([numels[one] for one in members], len(given)), key=lambda one: -one[0])
    shard = shard_numel(max(load for load, _ in loads), 1, block_size)
    offset_of = {}
    for owner, (load, numbers) in zip(sorted(range(len(given)), key=given.__getitem__), loads, strict=True):
        given[owner] += load
        offset = owner * shard
        for number in numbers:
            offset_of[number] = offset
            offset += numels[members[number]]
    slots = tuple(Slot(one, offset_of[number], numels[one]) for number, one in enumerate(members))
    return WholeLayout(slots, len(given), block_size, shard)


# Memory by ZeRO's formulas


def model_state_formula(
    stage: int,
    parameters: int,
    world_size: int,
    *,
    element_bytes: int = 2,
    state_bytes: float = 8,
    gradient_bytes: int | None = None,
) -> dict[str, float]:
    """Bytes a rank should hold, by category; their sum is the published figure.

    With Ψ parameters on N ranks, bf16 or fp16 with fp32 master weights and Adam (Rajbhandari et al. 2020, arXiv
    1910.02054, §5): stage 0 16Ψ, 1 4Ψ + 12Ψ/N, 2 2Ψ + 14Ψ/N, 3 16Ψ/N. fp32 parameters, their own
    master weights, have 4 + 4 + 8.

    Args:
        stage: 0 to 3.
        parameters: Ψ, trained ones.
        world_size: N.
        element_bytes: of a parameter as the model sees it: 2 or 4.
        state_bytes: of the optimizer a parameter: Adam 8, SGD with momentum 4, without 0.
        gradient_bytes: of a gradient that adds up, by default those of a parameter.

    Raises ValueError for a stage, size or combination that there is no formula for.
    """
    if stage not in (0, 1, 2, 3) or element_bytes not in (2, 4):
        raise ValueError(
            f"there is no formula for stage {stage} with parameters of {element_bytes} bytes: stages are 0 to 3, in "
            "fp32, bf16 or fp16"
        )
    master_weights = 0 if element_bytes == 4 else 4
    shared = 1 / world_size
    each = {
        "weights": element_bytes * (shared if stage == 3 else 1),
        "master weights": master_weights * (shared if stage >= 1 else 1),
        "gradients": (gradient_bytes or element_bytes) * (shared if stage >= 2 else 1),
        "optimizer state": state_bytes * (shared if stage >= 1 else 1),
    }
    return {category: parameters * factor for category, factor in each.items()}


def frozen_state_formula(
    parameters: int,
    world_size: int,
    *,
    element_bytes: int = 2,
    fresh_variance: bool = False,
    momentum_bits: int = 1,
    lanes: int = 1,
) -> dict[str, float]:
    """Bytes a rank should hold, by category, at ZeRO stages 1 and 2.

    With Ψ parameters on N ranks, in 16 bits: weights 2Ψ, worker residuals 2Ψ, preconditioner and momentum 1.125Ψ, and
    master weights and owner residuals 8Ψ/N; in fp32 9.125Ψ + 4Ψ/N.

    Args:
        parameters: Ψ, trained ones.
        world_size: N.
        element_bytes: of a parameter as the model sees it.
        fresh_variance: 1-bit LAMB's: another 4Ψ/N.
        momentum_bits: of an element, those of the codec that it is kept in.
        lanes: by node, ranks of one: each keeps its lane of the worker residuals, in fp32.
    """
    shared = 1 / world_size
    each = {
        "weights": element_bytes,
        "master weights": (0 if element_bytes == 4 else 4) * shared,
        "gradients": 0,
        "residuals": (4 / lanes if lanes > 1 else element_bytes) + 4 * shared,
        "optimizer state": 1 + momentum_bits / 8 + (4 * shared if fresh_variance else 0),
    }
    return {category: parameters * factor for category, factor in each.items()}
