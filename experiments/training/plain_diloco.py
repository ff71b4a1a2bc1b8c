"""DiLoCo as one would write it by hand, in plain torch: what thinwire's is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from thinwire.comm import Communicator

__all__ = ["PlainDiLoCo"]


class PlainDiLoCo(torch.optim.AdamW):
    """DiLoCo (Douillard et al. 2023, arXiv 2311.08105, Algorithm 1): own steps of AdamW, and every so many of them a
    Nesterov step on the mean of what the workers moved, which an all-reduce in fp32 takes at once, while all wait."""

    def __init__(
        self, params: ParamsT, comm: Communicator, *, every: int, outer_lr: float = 0.7, **options: Any
    ) -> None:
        """Takes what `torch.optim.AdamW` takes; rank 0's weights are given to all. Collective."""
        super().__init__(params, **options)
        # Its own message space, so that its counters hold outer gradients and nothing else.
        self.comm, self.every, self.since = comm.duplicate(), every, 0
        self.own = [parameter.data for group in self.param_groups for parameter in group["params"]]
        for weights in self.own:
            comm.broadcast(weights)
        self.common = [weights.clone() for weights in self.own]
        self.outer = torch.optim.SGD(self.common, lr=outer_lr, momentum=0.9, nesterov=True)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """A step of this worker's own, and an outer step when one is due."""
        loss: float | None = super().step(closure)
        self.since += 1
        if self.since == self.every:
            self.synchronize_weights()
        return loss

    @torch.no_grad()
    def synchronize_weights(self) -> None:
        """An outer step, unless one has just been; all workers then hold the same weights."""
        if not self.since:
            return
        self.since = 0
        moved = torch.cat([(common - own).flatten() for common, own in zip(self.common, self.own, strict=True)])
        self.comm.all_reduce(moved, "mean")
        for common, mean in zip(self.common, moved.split([one.numel() for one in self.common]), strict=True):
            common.grad = mean.view_as(common)
        self.outer.step()
        torch._foreach_copy_(self.own, self.common)

    def eval(self) -> None:
        """Show the weights that all have in common."""
        self.kept = [weights.clone() for weights in self.own]
        torch._foreach_copy_(self.own, self.common)

    def train(self) -> None:
        """Show this worker's own again."""
        torch._foreach_copy_(self.own, self.kept)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent for outer gradients."""
        return self.comm.traffic.bytes_sent
