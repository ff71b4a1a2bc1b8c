"""The freeze of packed state: owners turn their variance into the preconditioner that every worker then holds, and
their momentum into the first packets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.codecs import Codec
from thinwire.optim.formulas import SMALLEST_OF_MEAN, AdamSettings, shaped_mask, to_denominators
from thinwire.optim.preconditioner import quantize, table
from thinwire.zero.master_weights import FlatBucket, MasterWeights

__all__ = ["FrozenSettings", "FrozenState", "freeze", "hold_masked", "variance_norms"]


@dataclass(frozen=True)
class FrozenState:
    """What the freeze leaves of one bucket.

    `codes`: the preconditioner, uint8 [padded_numel]. `ranges`: its least and greatest value in each parameter, fp32
    [parameters, 2]. `momentum`: u as packets, uint8 [ranks, packet_bytes]. `owner_residual`: fp32 [shard].
    """

    codes: Tensor
    ranges: Tensor
    momentum: Tensor
    owner_residual: Tensor


@dataclass(frozen=True)
class FrozenSettings:
    """What the freeze asks of the `count` parameters by number: settings, masks; and the steps applied so far."""

    settings: Callable[[int], AdamSettings]
    mask: Callable[[int], Tensor | None]
    steps: int
    count: int


@dataclass(frozen=True)
class _Cut:
    """The own shard's run of one parameter: denominators, infinite where it stays, and momentum."""

    parameter: int
    place: slice
    denominator: Tensor
    momentum: Tensor


def freeze(
    comm: Communicator,
    masters: Sequence[MasterWeights],
    state: Sequence[Mapping[str, Tensor]],
    settings: FrozenSettings,
    codec: Codec,
    scale: Callable[[Sequence[Tensor]], None],
) -> list[FrozenState]:
    """Freeze every bucket; collective. Each rank reads the `state` of its own shards only, fp32 [shard] each.

    `scale` may change u in place, every bucket's own shard, fp32 [shard], before it is packed.

    Denominators are raised to a hundredth of their parameter's mean, as in OneBitAdam, and a coordinate whose variance
    is 0, or whose `exp_avg_mask` is, stays where it is.
    """
    cuts = [_cuts_of(one, of_bucket, settings) for one, of_bucket in zip(masters, state, strict=True)]
    device = masters[0].bucket.flat.device
    ranges = _ranges(comm, [cut for of_bucket in cuts for cut in of_bucket], settings.count, device)
    shards = [_Shard(one.bucket, of_bucket, ranges) for one, of_bucket in zip(masters, cuts, strict=True)]
    scale([shard.u for shard in shards])
    return [shard.publish(comm, codec) for shard in shards]


def hold_masked(bucket: FlatBucket, codes: Tensor, mask: Callable[[int], Tensor | None]) -> None:
    """Hold every parameter where its mask is zero, in the `codes` of a whole bucket, uint8 [padded_numel]."""
    for slot in bucket.layout.slots:
        of_parameter = mask(slot.parameter)
        if of_parameter is not None:
            whole = shaped_mask(of_parameter, bucket.shape_of(slot.parameter)).reshape(-1).to(codes.device)
            codes[slot.offset : slot.offset + slot.numel].masked_fill_(whole == 0, 0)


def variance_norms(
    comm: Communicator,
    masters: Sequence[MasterWeights],
    state: Sequence[Mapping[str, Tensor]],
    beta2: Callable[[int], float],
    steps: int,
    parameters: int,
) -> list[float]:
    """The 1-norm of each parameter's bias-corrected variance, over all ranks' shards; collective. `beta2`: of a
    parameter's group. `parameters`: how many there are."""
    norms = torch.zeros(parameters, dtype=torch.float64, device=masters[0].bucket.flat.device)
    for one, of_bucket in zip(masters, state, strict=True):
        for run in one.runs:
            norm = of_bucket["exp_avg_sq"][run.place].sum(dtype=torch.float64).to(norms.device)
            norms[run.parameter] += norm / (1 - beta2(run.parameter) ** float(steps))
    comm.all_reduce(norms)
    return norms.tolist()


def _cuts_of(masters: MasterWeights, state: Mapping[str, Tensor], settings: FrozenSettings) -> list[_Cut]:
    bucket = masters.bucket
    device = bucket.flat.device
    cuts = []
    for run in masters.runs:
        denominator = state["exp_avg_sq"][run.place].to(device, copy=True)
        momentum = state["exp_avg"][run.place].to(device)
        to_denominators([denominator], settings.settings(run.parameter), settings.steps)
        mask = settings.mask(run.parameter)
        if mask is not None:
            whole = shaped_mask(mask, bucket.shape_of(run.parameter)).reshape(-1).to(device)
            denominator.masked_fill_(whole[run.start : run.start + run.numel] == 0, float("inf"))
        cuts.append(_Cut(run.parameter, run.place, denominator, momentum))
    return cuts


def _ranges(comm: Communicator, cuts: Sequence[_Cut], parameters: int, device: torch.device) -> Tensor:
    """Raise the smallest denominators, and return each parameter's range of their inverses: fp32 [parameters, 2]."""
    sums = torch.zeros(parameters, 2, dtype=torch.float64, device=device)
    for cut in cuts:
        finite = torch.isfinite(cut.denominator)
        sums[cut.parameter, 0] += torch.where(finite, cut.denominator, 0.0).sum(dtype=torch.float64)
        sums[cut.parameter, 1] += finite.sum()
    comm.all_reduce(sums)
    smallest = SMALLEST_OF_MEAN * sums[:, 0] / sums[:, 1].clamp(min=1)
    highest = torch.zeros(parameters, dtype=torch.float64, device=device)
    for cut in cuts:
        cut.denominator.clamp_(min=float(smallest[cut.parameter]))
        finite = torch.where(torch.isfinite(cut.denominator), cut.denominator, 0.0)
        highest[cut.parameter] = torch.maximum(highest[cut.parameter], finite.max().double())
    lowest = torch.full_like(highest, -float("inf"))
    for cut in cuts:
        lowest[cut.parameter] = torch.maximum(lowest[cut.parameter], -cut.denominator.min().double())
    comm.all_reduce(highest, "max")
    comm.all_reduce(lowest, "max")
    # A parameter that stays altogether has no range; any will do, as none of its codes is used.
    moving = highest > 0
    low = torch.where(moving, 1 / highest, 1.0)
    high = torch.where(moving, -1 / lowest, 1.0)
    return torch.stack([low, high], dim=1).float()


class _Shard:
    """The own shard of a bucket, frozen: codes, uint8 [shard], and u, fp32 [shard]."""

    def __init__(self, bucket: FlatBucket, cuts: Sequence[_Cut], ranges: Tensor) -> None:
        layout = bucket.layout
        self._bucket = bucket
        self._ranges = ranges[[slot.parameter for slot in layout.slots]]
        tables = table(self._ranges[:, 0], self._ranges[:, 1])
        number_of = {slot.parameter: number for number, slot in enumerate(layout.slots)}
        self._codes = torch.zeros(layout.shard, dtype=torch.uint8, device=bucket.flat.device)
        self.u = torch.zeros(layout.shard, device=bucket.flat.device)
        for cut in cuts:
            low, high = ranges[cut.parameter].tolist()
            codes = quantize(1 / cut.denominator, low, high)
            self._codes[cut.place] = codes
            self.u[cut.place] = cut.momentum * tables[number_of[cut.parameter]][codes.int()]

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
