"""Whether every rank holds the same bits of the weights, where every one of them should."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from thinwire.comm import Communicator

__all__ = ["ComparisonTimes", "ReplicaDriftError", "compare_replicas"]


class ReplicaDriftError(RuntimeError):
    """Ranks' replicas of the weights differ, where every one of them should hold the same bits."""


class ComparisonTimes:
    """When replicas are compared: after every `interval`-th step or, where ranks hold weights of their own then, after
    the next that leaves them with the same."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self.shared_at = 0
        """The last step that left all ranks with the same weights."""

    def due(self, steps: int, in_sync: bool) -> bool:
        """Whether now, after `steps` steps. `in_sync`: all ranks should hold the same weights."""
        if not in_sync:
            return False
        passed = steps // self._interval > self.shared_at // self._interval
        self.shared_at = steps
        return passed


def compare_replicas(
    comm: Communicator, replicas: Iterable[Tensor], step: int, on_drift: Literal["repair", "raise"], source: str
) -> bool:
    """Whether the ranks hold the same weights; warns, or raises ReplicaDriftError, on every rank where not. Collective.

    `replicas`: weights in the parameters' dtype. `source`: what they will be repaired from.
    """
    mine = b"".join(_checksum(one).to_bytes(8, "little") for one in replicas)
    of_rank = comm.all_gather_bytes(mine, "compare the weights")
    drifted = [rank for rank, other in enumerate(of_rank) if other != of_rank[0]]
    if drifted:
        _report(comm, drifted, step, on_drift, source)
    return not drifted


def _report(
    comm: Communicator, ranks: Sequence[int], step: int, on_drift: Literal["repair", "raise"], source: str
) -> None:
    message = (
        f"the weights of ranks {list(ranks)} differ from rank 0's after step {step}: something changed them outside of "
        "the optimizer, or a rank's hardware computes differently"
    )
    if on_drift == "raise":
        raise ReplicaDriftError(message)
    if comm.rank == 0:
        warnings.warn(f"{message}. They were repaired from {source}", RuntimeWarning, stacklevel=6)


_AT_ONCE = 1 << 20
_ODD = 0x5851F42D4C957F2D


@torch.no_grad()
def _checksum(weights: Tensor) -> int:
    """A number that differs, but for chance, where a single bit does."""
    bits = weights.detach().reshape(-1).view(torch.int32 if weights.dtype == torch.float32 else torch.int16)
    total = 0
    for first in range(0, bits.numel(), _AT_ONCE):
        run = bits[first : first + _AT_ONCE].to(torch.int64)
        places = torch.arange(first + 1, first + 1 + run.numel(), device=run.device)
        total += int((run * (places * _ODD)).sum())
    return total % (1 << 64)
