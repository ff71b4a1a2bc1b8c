"""Which samples a worker of an elastic job reads, where nobody knows beforehand how many workers there will be."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler

from thinwire.optim.diloco.elastic_home import ElasticHome
from thinwire.optim.diloco.optimizer import DiLoCo
from thinwire.optim.options import check_count

__all__ = ["ElasticSampler"]


class ElasticSampler(Sampler[int]):
    """Samples of a data set in a shuffled order, each for one worker only, epoch after epoch without end.

    Workers claim `ahead` samples at a time at the meeting place. What a worker that died had claimed and not read
    nobody reads in that epoch.

        loader = DataLoader(dataset, batch_size=16, sampler=thinwire.ElasticSampler(optimizer, len(dataset)))

    Args:
        optimizer: a DiLoCo with `elastic`.
        size: how many samples there are.
        seed: of the order, which differs from epoch to epoch; the same on every worker.
        ahead: about what a worker reads from one outer step to the next.
    """

    def __init__(self, optimizer: DiLoCo, size: int, *, seed: int = 0, ahead: int = 512) -> None:
        if not isinstance(optimizer, DiLoCo) or not isinstance(optimizer._home, ElasticHome):
            raise ValueError("ElasticSampler needs a thinwire.DiLoCo with elastic=: others take torch's own samplers")
        check_count("size", size)
        check_count("ahead", ahead)
        self._claim: Callable[[int], int] = optimizer._home.membership.claim
        self._size = size
        self._seed = seed
        self._ahead = ahead

    def __iter__(self) -> Iterator[int]:
        epoch, order = -1, torch.empty(0)
        while True:
            first = self._claim(self._ahead)
            for number in range(first, first + self._ahead):
                if number // self._size != epoch:
                    epoch = number // self._size
                    generator = torch.Generator().manual_seed(hash((self._seed, epoch)) & (1 << 63) - 1)
                    order = torch.randperm(self._size, generator=generator)
                yield int(order[number % self._size])
