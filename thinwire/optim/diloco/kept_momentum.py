"""The outer momentum of the whole model on every worker, so that no owner takes any along when it dies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.optim.diloco.outer import OuterSettings, OuterState

__all__ = ["KeptMomentum"]


class KeptMomentum:
    """fp32 momentum by fragment, [elements]: exact where this worker is the owner, else what outer steps tell of it.

    An owner sends u = η (a + μ v) with v = μ v' + a (see OuterStep), so that v = (u / η + μ v') / (1 + μ). What the
    codec loses of u fades by a factor of μ / (1 + μ) with each outer step.
    """

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        self._values = [torch.zeros(numel, device=device) for numel in numels]

    def of(self, fragment: int) -> Tensor:
        """A fragment's, to be read and written."""
        return self._values[fragment]

    @property
    def nbytes(self) -> int:
        """Of all fragments."""
        return sum(one.nbytes for one in self._values)

    def follow(self, fragment: int, update: Tensor, settings: OuterSettings, owner: OuterState) -> None:
        """Take over what an outer step `update`, [elements], tells; and this owner's own."""
        kept = self._values[fragment]
        if settings.lr > 0:  # else an outer step tells nothing
            kept.mul_(settings.momentum).add_(update.float(), alpha=1 / settings.lr).div_(1 + settings.momentum)
        own = kept[owner.own]
        own.copy_(owner.momentum[: own.numel()])

    def hand_on(self, fragment: int, before: OuterState, after: OuterState, *, with_residuals: bool) -> None:
        """Give new owners their part of the momentum, and `with_residuals` a worker what it owes itself.

        The residual of what this worker sends stays; of what it owns, where it owned it before.
        """
        own = self._values[fragment][after.own]
        after.momentum[: own.numel()].copy_(own)
        if not with_residuals:
            return
        old, new = before.worker_residual, after.worker_residual
        if old is not None and new is not None:
            numel = min(old.numel(), new.numel())
            new[:numel].copy_(old[:numel])
        old, new = before.owner_residual, after.owner_residual
        first, last = max(before.own.start, after.own.start), min(before.own.stop, after.own.stop)
        if old is not None and new is not None and first < last:
            new[first - after.own.start : last - after.own.start].copy_(
                old[first - before.own.start : last - before.own.start]
            )
