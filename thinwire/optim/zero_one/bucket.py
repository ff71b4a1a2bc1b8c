"""What 0/1 Adam keeps of a bucket beside Adam's state: two exchanges at first, local steps' mean momentum later."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress.exchange import Exchange
from thinwire.optim.replicated.freeze_group import AdamBucket

__all__ = ["ZeroOneBucket"]


@dataclass(kw_only=True)
class ZeroOneBucket(AdamBucket):
    """A bucket whose `exchange` changes with the kind of step: `compressed`, with the residuals, or an exact one.

    `denominators`, fp32 [padded_numel], are √v̂ + ε at the last update of the variance, infinite where coordinates
    stay; once frozen `second` is the same tensor. `mean`, fp32 [padded_numel]: the average, weighted by learning rate,
    of the momenta of the local steps since the last sync; None before the variance is frozen.
    """

    compressed: Exchange
    denominators: Tensor
    mean: Tensor | None = None

    @property
    def compressor(self) -> Exchange:
        """See AdamBucket."""
        return self.compressed

    def find_still(self) -> None:
        """Mark the coordinates that have no variance, and forget what compression lost there."""
        still = torch.isinf(self.denominators)
        self.still = still if bool(still.any()) else None
        if self.still is not None:
            self.compressed.hold_zero(self.still)

    def begin_local_steps(self) -> None:
        """Let the variance go, and make room for the mean momentum."""
        self.second = self.denominators
        self.mean = torch.zeros_like(self.momentum)

    @property
    def mean_momentum(self) -> Tensor:
        """`mean`, once the variance is frozen."""
        assert self.mean is not None, "local steps begin when the variance is frozen"
        return self.mean
