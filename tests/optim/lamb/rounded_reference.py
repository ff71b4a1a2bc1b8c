"""OneBitLamb with the two roundings that sharded state makes at the freeze, so that the rest can be compared to the
last bits: the preconditioner in 8 bits, and the momentum as packets whose losses the owners remember."""

from __future__ import annotations

import torch

import thinwire
from thinwire.optim.lamb.algorithm import LambCohort
from thinwire.optim.sharded.preconditioner import quantize, table


class _RoundedCohort(LambCohort):
    def _turn_into_denominators(self, variances, members, settings, step) -> None:
        super()._turn_into_denominators(variances, members, settings, step)
        for denominator in variances:
            moving = denominator[torch.isfinite(denominator)]
            if moving.numel():
                low, high = (1 / moving.max()).view(1), (1 / moving.min()).view(1)
                codes = quantize(1 / denominator, float(low), float(high))
                denominator.copy_(1 / table(low, high)[0][codes.int()])

    def _freeze(self) -> None:
        super()._freeze()
        for bucket in self.buckets:
            shards, numel = bucket.layout.world_size, bucket.layout.numel
            packets = torch.zeros(shards, self._codec.packet_bytes(bucket.layout.shard), dtype=torch.uint8)
            lost = bucket.momentum.clone()
            self._codec.encode(lost, None, packets, numel)
            self._codec.decode(packets, bucket.momentum, numel)
            bucket.exchange.owner_residual.copy_(lost.view(shards, -1)[self._comm.rank])
            bucket.hold_still(bucket.momentum)


class RoundedOneBitLamb(thinwire.OneBitLamb):
    def _new_cohort(self, rule, layouts, first_index) -> LambCohort:
        return _RoundedCohort(
            self._table,
            self._exchange_comm,
            rule,
            self._warmup_codec,
            self._codec,
            self._compressed,
            layouts,
            first_index,
            self._links,
        )
