"""The freeze of packed state: owners turn their variance into the preconditioner that every worker then holds, and
their momentum into the first packets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.codecs import Codec
from thinwire.optim.algorithm import Form
from thinwire.optim.preconditioner import SMALLEST_OF_MEAN, quantize, shaped_mask, table
from thinwire.zero.master_weights import FlatBucket, MasterWeights, Run

__all__ = ["FrozenState", "Packing", "hold_masked", "variance_norms"]


@dataclass(frozen=True)
class FrozenState:
    """What the freeze leaves of one bucket.

    `codes`: the preconditioner, uint8 [padded_numel]. `ranges`: its least and greatest value in each parameter, fp32
    [parameters, 2]. `momentum`: u as packets, uint8 [ranks, packet_bytes]. `owner_residual`: fp32 [shard]. `extra`: by
    name, what else the algorithm's frozen state holds, fp32 [shard].
    """

    codes: Tensor
    ranges: Tensor
    momentum: Tensor
    owner_residual: Tensor
    extra: Mapping[str, Tensor]


class Packing:
    """The freeze of sharded state, fp32 [shard] each of every bucket, whose own shard each rank reads; collective.

    `state`: by bucket, renamed as the algorithm's frozen state, on the parameters' device. The algorithm's `freeze`
    works on it and calls `precondition`; then `publish` packs it.
    """

    def __init__(
        self,
        comm: Communicator,
        buckets: Sequence[FlatBucket],
        state: Sequence[dict[str, Tensor]],
        form: Form,
        count: int,
    ) -> None:
        """`count`: of the parameters of all buckets."""
        assert form.denominators is not None
        self.state = state
        self._comm = comm
        self._buckets = buckets
        self._momentum, self._denominators = form.momentum, form.denominators
        self._count = count
        self._ranges = torch.empty(0)
        self._codes = [torch.zeros(one.layout.shard, dtype=torch.uint8, device=one.flat.device) for one in buckets]

    def precondition(self) -> None:
        """Raise denominators to a hundredth of their parameter's mean, round their inverses to 8 bits, multiply the
        momentum by these, and have the denominators be what they stand for."""
        cuts = [
            (run.parameter, of_bucket[self._denominators][run.place])
            for bucket, of_bucket in zip(self._buckets, self.state, strict=True)
            for run in bucket.own_runs
        ]
        self._ranges = _ranges(self._comm, cuts, self._count, self._codes[0].device)
        for bucket, of_bucket, codes in zip(self._buckets, self.state, self._codes, strict=True):
            ranges = self._ranges[[run.parameter for run in bucket.own_runs]]
            tables = table(ranges[:, 0], ranges[:, 1])
            for run, of_run, (low, high) in zip(bucket.own_runs, tables, ranges.tolist(), strict=True):
                denominators = of_bucket[self._denominators][run.place]
                codes[run.place] = quantize(1 / denominators, low, high)
                inverse = of_run[codes[run.place].int()]
                of_bucket[self._momentum][run.place].mul_(inverse)
                denominators.copy_(inverse.reciprocal_())

    def publish(self, codec: Codec) -> list[FrozenState]:
        """Give every bucket's codes and u to all ranks, and keep what u's packets lost."""
        return [self._publish(codec, *one) for one in zip(self._buckets, self.state, self._codes, strict=True)]

    def _publish(self, codec: Codec, bucket: FlatBucket, state: Mapping[str, Tensor], own_codes: Tensor) -> FrozenState:
        u, layout = state[self._momentum], bucket.layout
        codes = torch.empty(layout.padded_numel, dtype=torch.uint8, device=u.device)
        self._comm.all_gather(codes, own_codes)
        own = torch.zeros(1, codec.packet_bytes(layout.shard), dtype=torch.uint8, device=u.device)
        first, last = bucket.own_range
        codec.encode(u, None, own, last - first)
        u.masked_fill_(own_codes == 0, 0.0)
        momentum = torch.empty(self._comm.size, own.shape[1], dtype=torch.uint8, device=u.device)
        self._comm.all_gather(momentum.view(-1), own.view(-1))
        ranges = self._ranges[[slot.parameter for slot in layout.slots]]
        extra = {name: one for name, one in state.items() if name not in (self._momentum, self._denominators)}
        return FrozenState(codes, ranges, momentum, u, extra)


def hold_masked(bucket: FlatBucket, runs: Sequence[Run], values: Tensor, mask: Callable[[int], Tensor | None]) -> None:
    """Zero `values`, variances or codes, at the places of these runs in them, where their parameter's mask is zero."""
    for run in runs:
        of_parameter = mask(run.parameter)
        if of_parameter is not None:
            whole = shaped_mask(of_parameter, bucket.shape_of(run.parameter)).reshape(-1).to(values.device)
            values[run.place].masked_fill_(whole[run.start : run.start + run.numel] == 0, 0)


def variance_norms(
    comm: Communicator,
    masters: Sequence[MasterWeights],
    state: Sequence[Mapping[str, Tensor]],
    variance: str,
    beta2: Callable[[int], float],
    steps: int,
    parameters: int,
) -> list[float]:
    """The 1-norm of each parameter's bias-corrected variance, over all ranks' shards; collective. `variance`: its
    name. `beta2`: of a parameter's group. `parameters`: how many there are."""
    norms = torch.zeros(parameters, dtype=torch.float64, device=masters[0].bucket.flat.device)
    for one, of_bucket in zip(masters, state, strict=True):
        for run in one.runs:
            norm = of_bucket[variance][run.place].sum(dtype=torch.float64).to(norms.device)
            norms[run.parameter] += norm / (1 - beta2(run.parameter) ** float(steps))
    comm.all_reduce(norms)
    return norms.tolist()


def _ranges(comm: Communicator, cuts: Sequence[tuple[int, Tensor]], count: int, device: torch.device) -> Tensor:
    """Raise the smallest denominators, and return each parameter's range of their inverses: fp32 [parameters, 2]."""
    sums = torch.zeros(count, 2, dtype=torch.float64, device=device)
    for parameter, denominators in cuts:
        finite = torch.isfinite(denominators)
        sums[parameter, 0] += torch.where(finite, denominators, 0.0).sum(dtype=torch.float64)
        sums[parameter, 1] += finite.sum()
    comm.all_reduce(sums)
    smallest = SMALLEST_OF_MEAN * sums[:, 0] / sums[:, 1].clamp(min=1)
    highest = torch.zeros(count, dtype=torch.float64, device=device)
    for parameter, denominators in cuts:
        denominators.clamp_(min=float(smallest[parameter]))
        finite = torch.where(torch.isfinite(denominators), denominators, 0.0)
        highest[parameter] = torch.maximum(highest[parameter], finite.max().double())
    lowest = torch.full_like(highest, -float("inf"))
    for parameter, denominators in cuts:
        lowest[parameter] = torch.maximum(lowest[parameter], -denominators.min().double())
    comm.all_reduce(highest, "max")
    comm.all_reduce(lowest, "max")
    # A parameter that stays altogether has no range; any will do, as none of its codes is used.
    moving = highest > 0
    low = torch.where(moving, 1 / highest, 1.0)
    high = torch.where(moving, -1 / lowest, 1.0)
    return torch.stack([low, high], dim=1).float()
