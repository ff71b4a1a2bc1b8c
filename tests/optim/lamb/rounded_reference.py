"""OneBitLamb with the two roundings that sharded state makes at the freeze, so that the rest can be compared to the
last bits: the preconditioner in 8 bits, and the momentum as packets whose losses the owners remember."""

from __future__ import annotations

import torch

import thinwire
from tests.optim.training import buckets_of
from thinwire.compress import make_codec
from thinwire.compress.parts import zero_held
from thinwire.optim.lamb import Lamb
from thinwire.optim.preconditioner import quantize, table


class _RoundedLamb(Lamb):
    def freeze(self, groups, clock, agree, precondition) -> None:
        momenta = [[momentum.clone() for momentum in members["exp_avg"]] for members in groups]

        def precondition_in_8_bits() -> None:
            precondition()
            for members, before in zip(groups, momenta, strict=True):
                for momentum, exact, denominator in zip(
                    members["exp_avg"], before, members["denominator"], strict=True
                ):
                    inverse = _in_8_bits(1 / denominator)
                    denominator.copy_(1 / inverse)
                    torch.mul(exact, inverse, out=momentum)

        super().freeze(groups, clock, agree, precondition_in_8_bits)


def _in_8_bits(inverse: torch.Tensor) -> torch.Tensor:
    moving = inverse[inverse > 0]
    if not moving.numel():
        return inverse
    low, high = moving.min().view(1), moving.max().view(1)
    return table(low, high)[0][quantize(inverse, float(low), float(high)).int()]


class RoundedOneBitLamb(thinwire.OneBitLamb):
    def __init__(self, params, *, comm, block_size, **options) -> None:
        super().__init__(params, comm=comm, block_size=block_size, **options)
        self._home._layout._make_algorithm = lambda: _RoundedLamb("update")
        self._codec = make_codec("sign1", block_size)

    def step(self, closure=None) -> None:
        super().step(closure)
        if self.last_step.applied and self.frozen_at == self.steps:
            self._pack_momenta()

    @torch.no_grad()
    def _pack_momenta(self) -> None:
        for bucket in buckets_of(self):
            shards, numel, momentum = bucket.layout.world_size, bucket.layout.numel, bucket.state["exp_avg"]
            packets = torch.zeros(shards, self._codec.packet_bytes(bucket.layout.shard), dtype=torch.uint8)
            lost = momentum.clone()
            self._codec.encode(lost, None, packets, numel)
            self._codec.decode(packets, momentum, numel)
            bucket.compressed.owner_residual.copy_(lost.view(shards, -1)[self.comm.rank])
            if bucket.zero_variance is not None:
                zero_held(momentum, bucket.zero_variance, slice(0, momentum.numel()))
                bucket.compressed.hold_zero(bucket.zero_variance)
