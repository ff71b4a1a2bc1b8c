"""The freeze of sharded 1-bit Adam: owners turn their variance into the preconditioner that every worker then holds,
and their momentum into the first packets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.codecs import Codec
from thinwire.optim.formulas import SMALLEST_OF_MEAN, AdamSettings, to_denominators
from thinwire.optim.sharded.preconditioner import quantize, table
from thinwire.zero.flat_bucket import FlatBucket
from thinwire.zero.master_weights import BucketMasters

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
    scale: Callable[[Sequence[Tensor]], None],
) -> list[FrozenState]:
    """Freeze every bucket; collective. Each rank reads the state of its own shards only.

    `scale` may change u in place, every bucket's own shard, fp32 [shard], before it is packed.

    Denominators are raised to a hundredth of their parameter's mean, as in OneBitAdam, and a coordinate whose variance
    is 0, or whose `exp_avg_mask` is, stays still.
    """
    parts = [_parts_of(one, groups, group_of) for one in masters]
    ranges = _ranges(comm, [part for of_bucket in parts for part in of_bucket], len(group_of), buckets[0].flat.device)
    shards = [_Shard(bucket, of_bucket, ranges) for bucket, of_bucket in zip(buckets, parts, strict=True)]
    scale([shard.u for shard in shards])
    return [shard.publish(comm, codec) for shard in shards]


def variance_norm(comm: Communicator, masters: Sequence[BucketMasters], beta2: Callable[[int], float]) -> float:
    """The 1-norm of the bias-corrected variance over all ranks' shards; collective.

    `beta2` is that of a parameter's group.
    """
    total = torch.zeros((), dtype=torch.float64, device=masters[0].bucket.flat.device)
    for one in masters:
        for number, cut in one.own_cuts():
            state = one.state_of(number)
            if "exp_avg_sq" in state:
                norm = state["exp_avg_sq"][cut].sum(dtype=torch.float64).to(total.device)
                total += norm / (1 - beta2(one.runs[number].parameter) ** float(state["step"]))
    comm.all_reduce(total)
    return float(total)


def _parts_of(masters: BucketMasters, groups: Sequence[Mapping[str, Any]], group_of: Sequence[int]) -> list[_Part]:
    """The own shard's parts, with places in the shard."""
    first = masters.bucket.own_range[0] if masters.whole else 0
    parts = []
    for number, cut in masters.own_cuts():
        run, state = masters.runs[number], masters.state_of(number)
        group = groups[group_of[run.parameter]]
        device = masters.bucket.flat.device
        if "exp_avg_sq" in state:
            variance = state["exp_avg_sq"][cut].to(device, copy=True)
            momentum = state["exp_avg"][cut].to(device)
            to_denominators([variance], AdamSettings.of_group({**_DEFAULTS, **group}), int(state["step"]))
        else:  # it never had a gradient
            variance = torch.full((cut.stop - cut.start,), float("inf"), device=device)
            momentum = torch.zeros_like(variance)
        mask = group.get("exp_avg_mask")
        if mask is not None:
            shape = masters.bucket.shape_of(run.parameter)
            held = mask.to(device).expand(shape).reshape(-1)[run.start + cut.start : run.start + cut.stop] == 0
            variance.masked_fill_(held, float("inf"))
        begin = run.place.start + cut.start - first
        parts.append(_Part(run.parameter, slice(begin, begin + len(variance)), variance, momentum))
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


class _Shard:
    """The own shard of a bucket, frozen: codes, uint8 [shard], and u, fp32 [shard]."""

    def __init__(self, bucket: FlatBucket, parts: Sequence[_Part], ranges: Tensor) -> None:
        layout = bucket.layout
        self._bucket = bucket
        self._ranges = ranges[[slot.parameter for slot in layout.slots]]
        tables = table(self._ranges[:, 0], self._ranges[:, 1])
        number_of = {slot.parameter: number for number, slot in enumerate(layout.slots)}
        self._codes = torch.zeros(layout.shard, dtype=torch.uint8, device=bucket.flat.device)
        self.u = torch.zeros(layout.shard, device=bucket.flat.device)
        for part in parts:
            low, high = ranges[part.parameter].tolist()
            codes = quantize(1 / part.denominator, low, high)
            self._codes[part.place] = codes
            self.u[part.place] = part.momentum * tables[number_of[part.parameter]][codes.int()]

    def publish(self, comm: Communicator, codec: Codec) -> FrozenState:
        """Give codes and u to all ranks, and keep what u's packets lost; collective."""
        bucket = self._bucket
        codes = torch.empty(bucket.layout.padded_numel, dtype=torch.uint8, device=self.u.device)
        comm.all_gather(codes, self._codes)
        own = torch.zeros(1, codec.packet_bytes(bucket.layout.shard), dtype=torch.uint8, device=self.u.device)
        first, last = bucket.own_range
        codec.encode(self.u, None, own, last - first)
        self.u.masked_fill_(self._codes == 0, 0.0)
        momentum = torch.empty(comm.size, own.shape[1], dtype=torch.uint8, device=self.u.device)
        comm.all_gather(momentum.view(-1), own.view(-1))
        return FrozenState(codes, self._ranges, momentum, self.u)
