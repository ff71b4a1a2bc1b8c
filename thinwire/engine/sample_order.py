"""Samples of each global step, and their deal to the ranks: a function of the seed and the position
alone, so that a job can go on with other ranks and batch sizes without losing or repeating a sample."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

__all__ = ["Dealer", "RankBatch", "SampleOrder", "seeded"]

_MOST_INT32 = 2**31 - 1


@dataclass(frozen=True)
class SampleOrder:
    """The order of `samples` samples in each epoch, a function of (`seed`, epoch) only."""

    samples: int
    shuffle: bool
    seed: int

    def of(self, epoch: int) -> Tensor:
        """All sample numbers, [samples], int32 where that is wide enough, else int64."""
        dtype = torch.int32 if self.samples <= _MOST_INT32 else torch.int64
        if not self.shuffle:
            return torch.arange(self.samples, dtype=dtype)
        generator = torch.Generator().manual_seed(_mix(self.seed, epoch))
        return torch.randperm(self.samples, generator=generator, dtype=dtype)


@dataclass(frozen=True)
class RankBatch:
    """One rank's part of a global step: `indices` of its samples, and the `seed` of what is random about them."""

    indices: list[int]
    seed: int


@dataclass(frozen=True)
class Dealer:
    """Deals an epoch's order to `world_size` ranks, `micro_batch_size` consecutive samples to each.

    What does not fill a global batch at the end is left out with `drop_last`. Else every rank gets one smaller batch of
    equal size, for which up to `world_size` - 1 samples from the epoch's start are repeated.
    """

    order: SampleOrder
    micro_batch_size: int
    world_size: int
    drop_last: bool

    @property
    def global_batch(self) -> int:
        """Samples that all ranks take in one step."""
        return self.micro_batch_size * self.world_size

    @property
    def batches_per_epoch(self) -> int:
        """Of each rank, in an epoch from its start."""
        whole, rest = divmod(self.order.samples, self.global_batch)
        return whole + int(rest > 0 and not self.drop_last)

    def advance(self, consumed: int) -> int:
        """Samples consumed after the step that begins at `consumed`; repeated ones do not count."""
        return min(consumed + self.global_batch, self.order.samples)

    def has_batch(self, consumed: int) -> bool:
        """Whether the epoch has another step after `consumed` samples."""
        left = self.order.samples - consumed
        return left >= self.global_batch or (left > 0 and not self.drop_last)

    def batches(self, epoch: int, consumed: int, rank: int) -> Iterator[RankBatch]:
        """What `rank` gets in the rest of `epoch`, of which `consumed` samples are done."""
        order = self.order.of(epoch) if self.has_batch(consumed) else torch.empty(0)
        while self.has_batch(consumed):
            share = -(-(self.advance(consumed) - consumed) // self.world_size)
            first = consumed + rank * share
            positions = torch.arange(first, first + share) % self.order.samples
            seed = _mix(self.order.seed, epoch, consumed, rank)
            yield RankBatch(order[positions].tolist(), seed)
            consumed = self.advance(consumed)


def _mix(*numbers: int) -> int:
    """A 63-bit seed; nearby numbers give unrelated ones."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


# The generators belong to the process: ranks that are threads would put back each other's states.
_generators_in_use = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python's, numpy's and torch's CPU generators with `seed`, and give them their states back at the end."""
    # A worker is one thread, forked perhaps while another thread of its parent held the lock.
    alone = _generators_in_use if get_worker_info() is None else nullcontext()
    with alone, torch.random.fork_rng(devices=[]):
        python_state, numpy_state = random.getstate(), np.random.get_state()
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
