"""The freeze of sharded 1-bit Adam: owners turn their variance into the preconditioner that every worker then holds,
and their momentum into the first packets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.adam_math import SMALLEST_OF_MEAN, AdamSettings, to_denominators
from thinwire.compress.codecs import Codec
from thinwire.compress.preconditioner import quantize, table
from thinwire.zero.flat import FlatBucket
from thinwire.zero.masters import BucketMasters

__all__ = ["FrozenState", "freeze", "variance_norm"]


class FrozenState:
    """What the freeze leaves of one bucket.

    `codes`: the preconditioner, uint8 [padded_numel]. `ranges`: its least and greatest value in each parameter, fp32
    [parameters, 2]. `momentum`: u as packets, uint8 [ranks, packet_bytes]. `owner_residual`: fp32 [shard].
    """

    def __init__(self, codes: Tensor, ranges: Tensor, momentum: Tensor, owner_residual: Tensor) -> None:
        self.codes = codes
        self.ranges = ranges
        self.momentum = momentum
        self.owner_residual = owner_residual


class _Part:
    """The part of one parameter that this rank froze: inverse denominators, 0 where it stays, and momentum."""

    def __init__(self, parameter: int, place: slice, denominator: Tensor, momentum: Tensor) -> None:
        self.parameter = parameter
        self.place = place
        self.denominator = denominator
        self.momentum = momentum


def freeze(
    comm: Communicator,
    buckets: Sequence[FlatBucket],
    masters: Sequence[BucketMasters],
    groups: Sequence[Mapping[str, Any]],
    group_of: Sequence[int],
    codec: Codec,
) -> list[FrozenState]:
    """Freeze every bucket; collective. Each rank reads the state of its own shards only.

    Denominators are raised to a hundredth of their parameter's mean, as in OneBitAdam, and a coordinate whose variance
    is 0, or whose `exp_avg_mask` is, stays still.
    """
    parts = [_parts_of(one, groups, group_of) for one in masters]
    ranges = _ranges(comm, [part for of_bucket in parts for part in of_bucket], len(group_of), buckets[0].flat.device)
    return [
        _freeze_bucket(comm, bucket, of_bucket, ranges, codec) for bucket, of_bucket in zip(buckets, parts, strict=True)
    ]


def variance_norm(comm: Communicator, masters: Sequence[BucketMasters], beta2: Callable[[int], float]) -> float:
    """The 1-norm of the bias-corrected variance over all ranks' shards; collective.

    `beta2` is that of a parameter's group.
    """
    total = torch.zeros((), dtype=torch.float64, device=masters[0].bucket.flat.device)
    for one in masters:
        low, high = _own_places(one)
        for number, run in enumerate(one.runs):
            state = one.state_of(number)
            if "exp_avg_sq" in state:
                begin, end = max(run.place.start, low), min(run.place.stop, high)
                own = state["exp_avg_sq"][max(0, begin - run.place.start) : max(0, end - run.place.start)]
                total += own.sum(dtype=torch.float64).to(total.device) / (
                    1 - beta2(run.parameter) ** float(state["step"])
                )
    comm.all_reduce(total)
    return float(total)


def _own_places(masters: BucketMasters) -> tuple[int, int]:
    """Where, in what these masters hold, this rank's shard begins and ends."""
    low, high = masters.bucket.own_range
    return (low, high) if masters.whole else (0, high - low)


def _parts_of(masters: BucketMasters, groups: Sequence[Mapping[str, Any]], group_of: Sequence[int]) -> list[_Part]:
    """The own shard's parts, with places in the shard."""
    low, high = _own_places(masters)
    parts = []
    for number, run in enumerate(masters.runs):
        begin, end = max(run.place.start, low), min(run.place.stop, high)
        if begin >= end:
            continue
        cut = slice(begin - run.place.start, end - run.place.start)
        state = masters.state_of(number)
        group = groups[group_of[run.parameter]]
        device = masters.bucket.flat.device
        if "exp_avg_sq" in state:
            variance = state["exp_avg_sq"][cut].to(device, copy=True)
            momentum = state["exp_avg"][cut].to(device)
            to_denominators([variance], AdamSettings.of_group({**_DEFAULTS, **group}), int(state["step"]))
        else:  # it never had a gradient
            variance = torch.full((end - begin,), float("inf"), device=device)
            momentum = torch.zeros_like(variance)
        mask = group.get("exp_avg_mask")
        if mask is not None:
            shape = masters.bucket.shape_of(run.parameter)
            held = mask.to(device).expand(shape).reshape(-1)[run.start + cut.start : run.start + cut.stop] == 0
            variance.masked_fill_(held, float("inf"))
        parts.append(_Part(run.parameter, slice(begin - low, end - low), variance, momentum))
    return parts


_DEFAULTS = {"bias_correction": True, "eps_inside_sqrt": False}


def _ranges(comm: Communicator, parts: Sequence[_Part], parameters: int, device: torch.device) -> Tensor:
    """Raise the parts' smallest denominators, and return each parameter's range: float64 [parameters, 2]."""
    sums = torch.zeros(parameters, 2, dtype=torch.float64, device=device)
    for part in parts:
        finite = torch.isfinite(part.denominator)
        sums[part.parameter, 0] += torch.where(finite, part.denominator, 0.0).sum(dtype=torch.float64)
        sums[part.parameter, 1] += finite.sum()
    comm.all_reduce(sums)
    smallest = SMALLEST_OF_MEAN * sums[:, 0] / sums[:, 1].clamp(min=1)
    highest = torch.zeros(parameters, dtype=torch.float64, device=device)
    for part in parts:
        part.denominator.clamp_(min=float(smallest[part.parameter]))
        finite = torch.where(torch.isfinite(part.denominator), part.denominator, 0.0)
        highest[part.parameter] = torch.maximum(highest[part.parameter], finite.max().double())
    lowest = torch.full_like(highest, -float("inf"))
    for part in parts:
        lowest[part.parameter] = torch.maximum(lowest[part.parameter], -part.denominator.min().double())
    comm.all_reduce(highest, "max")
    comm.all_reduce(lowest, "max")
    # A parameter that stays altogether has no range; any will do, as none of its codes is used.
    moving = highest > 0
    low = torch.where(moving, 1 / highest, 1.0)
    high = torch.where(moving, -1 / lowest, 1.0)
    return torch.stack([low, high], dim=1).float()


def _freeze_bucket(
    comm: Communicator, bucket: FlatBucket, parts: Sequence[_Part], ranges: Tensor, codec: Codec
) -> FrozenState:
    layout = bucket.layout
    device = bucket.flat.device
    of_slots = ranges[[slot.parameter for slot in layout.slots]]
    tables = table(of_slots[:, 0], of_slots[:, 1])
    number_of = {slot.parameter: number for number, slot in enumerate(layout.slots)}
    codes = torch.zeros(layout.shard, dtype=torch.uint8, device=device)
    u = torch.zeros(layout.shard, device=device)
    for part in parts:
        low, high = ranges[part.parameter].tolist()
        inverse = 1 / part.denominator
        codes[part.place] = quantize(inverse, low, high)
        u[part.place] = part.momentum * tables[number_of[part.parameter]][codes[part.place].int()]
    every_code = torch.empty(layout.padded_numel, dtype=torch.uint8, device=device)
    comm.all_gather(every_code, codes)
    own = torch.zeros(1, codec.packet_bytes(layout.shard), dtype=torch.uint8, device=device)
    first, last = bucket.own_range
    codec.encode(u, None, own, last - first)
    u.masked_fill_(codes == 0, 0.0)
    momentum = torch.empty(comm.size, own.shape[1], dtype=torch.uint8, device=device)
    comm.all_gather(momentum.view(-1), own.view(-1))
    return FrozenState(every_code, of_slots, momentum, u)
