"""Data for workers that come and go: samples that each claims for itself between the outer steps of DiLoCo, or steps of
always as many samples, dealt among the workers that there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Sampler

from thinwire.optim.diloco.elastic_home import ElasticHome
from thinwire.optim.options import check_count
from thinwire.optim.replicated.elastic_workers import ElasticWorkers
from thinwire.optim.replicated.home import ReplicatedHome
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

Batch = TypeVar("Batch")


class _Order:
    """A shuffled order of `size` samples, another one each epoch; `of`: the sample that a number from 0 up means.

    Raises TypeError for a seed that is no int: the hash of a text is another one in each process.
    """

    def __init__(self, size: int, seed: int) -> None:
        if not isinstance(seed, int):
            raise TypeError(f"seed must be a whole number, the same on every worker, got {seed!r}")
        self._size, self._seed, self._epoch = size, seed, -1
        self._order = torch.empty(0)

    def of(self, number: int) -> int:
        epoch, place = divmod(number, self._size)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(hash((self._seed, epoch)) & (1 << 63) - 1)
            self._epoch, self._order = epoch, torch.randperm(self._size, generator=generator)
        return int(self._order[place])


class ElasticSampler(Sampler[int]):
    """Samples of a data set in a shuffled order, each for one worker only, epoch after epoch without end.

    Workers claim `ahead` samples at a time at the meeting place. What a worker that died had claimed and not read
    is not read in that epoch. A job that goes on from another's state goes on where that one's claims ended.

        loader = DataLoader(dataset, batch_size=16, sampler=thinwire.ElasticSampler(optimizer, len(dataset)))

    Args:
        optimizer: one with `elastic`.
        size: how many samples there are.
        seed: of the order, which differs from epoch to epoch; the same on every worker.
        ahead: about what a worker reads from one outer step of DiLoCo to the next.

    Raises ValueError, or TypeError, for what cannot work, or is not as on the job's first worker.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, size: int, *, seed: int = 0, ahead: int = 512) -> None:
        home = getattr(optimizer, "_home", None)
        part = home.workers if isinstance(home, ReplicatedHome) else home
        if not isinstance(part, ElasticHome | ElasticWorkers):
            raise ValueError("ElasticSampler needs an optimizer with elastic=: others take torch's own samplers")
        check_count("size", size)
        check_count("ahead", ahead)
        self._order = _Order(size, seed)
        claims = part.membership.claims
        claims.check_meaning({"size of ElasticSampler": size, "seed of ElasticSampler": seed})
        self._claim: Callable[[int], int] = claims.claim
        self._ahead = ahead
        self._claimed = iter(range(0))  # and not read: also by whoever iterates next

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from map(self._order.of, self._claimed)
            first = self._claim(self._ahead)
            self._claimed = iter(range(first, first + self._ahead))


@dataclass
class _Dealing:
    """How far the samples of all workers are given out: numbers from `next` up are not, and those `owed` come before
    them, as the workers that had got them died. `open`: the workers, and numbers, of steps that are not committed."""

    next: int
    owed: list[int]
    open: list[tuple[list[str], list[int]]]

    def deal(self, batch: int) -> list[int]:
        """Give out the numbers of one step."""
        found, self.owed = self.owed[:batch], self.owed[batch:]
        first, self.next = self.next, self.next + batch - len(found)
        return [*found, *range(first, self.next)]


class ElasticBatchSampler(Sampler[list[int]]):
    """Micro-batches of an elastic job whose steps have always as many samples, however many workers there are: each
    sample counts in one step an epoch, epoch after epoch without end.

        sampler = thinwire.ElasticBatchSampler(optimizer, len(dataset), batch=96, micro_batch=8)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, persistent_workers=True)
        for step in sampler.steps(loader):
            for inputs, targets in step:
                (step.weight * loss(model(inputs), targets)).backward()
            optimizer.step()
            optimizer.zero_grad()

    The micro-batches of a step are dealt among the workers that begin it. What a worker had got that died before its
    gradients counted is dealt anew, first of all, in the next step.

    Args:
        optimizer: with `elastic`, and steps in which all workers take part: OneBitAdam, say, and not DiLoCo.
        size: how many samples there are.
        batch: samples of a step, of all workers together: a multiple of `micro_batch`.
        micro_batch: samples of one backward.
        seed: of the order, which differs from epoch to epoch; the same on every worker.

    Make one on every worker before its first step. Raises ValueError, or TypeError, for what cannot work, or is not as
    on the job's first worker, which ends this worker's part in the job.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, size: int, *, batch: int, micro_batch: int, seed: int = 0
    ) -> None:
        home = getattr(optimizer, "_home", None)
        workers = home.workers if isinstance(home, ReplicatedHome) else None
        if not isinstance(optimizer, SynchronizedOptimizer) or workers is None:
            raise TypeError(
                "ElasticBatchSampler needs an optimizer with elastic= in whose steps all workers take part: with "
                f"DiLoCo use ElasticSampler, without elastic= torch's own; got {type(optimizer).__name__}"
            )
        for name, value in (("size", size), ("batch", batch), ("micro_batch", micro_batch)):
            check_count(name, value)
        if batch % micro_batch:
            raise ValueError(f"batch={batch} is no multiple of micro_batch={micro_batch}")
        if workers.in_use:
            raise ValueError("make the ElasticBatchSampler before the optimizer's first step, whose data it deals")
        self._order = _Order(size, seed)
        told = {"size": size, "batch": batch, "micro_batch": micro_batch, "seed": seed}
        workers.membership.agree_on({f"{name} of ElasticBatchSampler": one for name, one in told.items()}, "data")
        self._optimizer, self._workers = optimizer, workers
        self._batch, self._micro_batch = batch, micro_batch
        self._taken = self._changed = 0  # steps, and how often some died whose samples were dealt anew
        self.load_state_dict(workers.shared_data or {"next": 0, "owed": [], "open": []})
        workers.on_step = self._end_step

    def state_dict(self) -> dict[str, Any]:
        """How far the samples are given out, the same on every worker, as plain values."""
        dealing = self._dealing
        return {"next": dealing.next, "owed": list(dealing.owed), "open": [list(one) for one in dealing.open]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, on every worker alike and before the first step."""
        opened = [(list(names), list(numbers)) for names, numbers in state["open"]]
        self._dealing = _Dealing(state["next"], list(state["owed"]), opened)
        self._workers.shared_data = self.state_dict()

    def __iter__(self) -> Iterator[list[int]]:
        """This worker's micro-batches from the next step on, as long as the workers stay the same."""
        ahead = _Dealing(self._dealing.next, list(self._dealing.owed), [])
        names = self._workers.dealt_to
        while True:
            numbers = ahead.deal(self._batch)
            for one in self._shares(names, numbers)[self._workers.membership.name]:
                yield list(map(self._order.of, one))

    def steps(self, loader: Iterable[Batch]) -> Iterator[StepBatches[Batch]]:
        """The steps to come, each with this worker's batches of `loader`, whose `batch_sampler` this is. It is begun
        anew when workers have come or gone, so that what it had read ahead for others is not used.

        Raises ValueError for a DataLoader that deals otherwise, and if there are more workers than micro-batches, on
        those that came last, which get none and leave the job; RuntimeError unless the optimizer steps once for each.
        """
        if isinstance(loader, DataLoader) and loader.batch_sampler is not self:
            raise ValueError(
                "steps() was given a DataLoader that reads what another sampler says, so that workers would read the "
                "same samples: build it with batch_sampler=, this sampler, and no batch_size, shuffle or sampler"
            )
        while True:
            names, changed, batches = self._workers.dealt_to, self._changed, iter(loader)
            count, workers = self._batch // self._micro_batch, len(names)
            mine = len(self._shares(names, list(range(self._batch)))[self._workers.membership.name])
            if not mine:
                self._workers.close()
                raise ValueError(f"{count} micro-batches a step are too few for {workers} workers: make them smaller")
            while (self._workers.dealt_to, self._changed) == (names, changed):
                taken, step = self._taken, StepBatches(self._optimizer, batches, mine, min(workers, count) / count)
                yield step
                if self._taken != taken + 1:
                    raise RuntimeError(f"the optimizer took {self._taken - taken} steps for one of the sampler's")
                step.skip_rest()

    def _shares(self, names: Sequence[str], numbers: list[int]) -> dict[str, list[list[int]]]:
        """The micro-batches of each worker; if they are too few, of those that have been in the job for longest."""
        size, workers = self._micro_batch, len(names)
        cut = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        taking = min(workers, len(cut))
        ends = [len(cut) * min(place, taking) // taking for place in range(workers + 1)]
        return {name: cut[ends[place] : ends[place + 1]] for place, name in enumerate(names)}

    def _end_step(self, dealt_to: list[str], took_part: list[str] | None) -> None:
        """Take note of a step; `took_part`: the workers whose gradients count, None if that is not known yet."""
        dealing = self._dealing
        dealing.open.append((dealt_to, dealing.deal(self._batch)))
        if took_part is not None:
            for names, numbers in dealing.open:
                lost = [batches for name, batches in self._shares(names, numbers).items() if name not in took_part]
                self._changed += len(lost)
                dealing.owed += [number for batches in lost for batch in batches for number in batch]
            dealing.open = []
        self._taken += 1
        self._workers.shared_data = self.state_dict()


class StepBatches(Generic[Batch]):
    """This worker's batches of one step. `weight`: what each batch's mean loss counts, so that the step's gradient is
    the mean over all samples of all workers. Backwards but for that of the last batch only add up."""

    def __init__(self, optimizer: SynchronizedOptimizer, batches: Iterator[Batch], count: int, weight: float) -> None:
        self._optimizer, self._batches, self._count, self.weight = optimizer, batches, count, weight

    def __iter__(self) -> Iterator[Batch]:
        while self._count:
            self._count -= 1
            with self._optimizer.no_sync() if self._count else nullcontext():
                yield self._next()

    def skip_rest(self) -> None:
        """Drop the batches that the step did without, which no later one is to have."""
        for _ in range(self._count):
            self._next()

    def _next(self) -> Batch:
        for batch in self._batches:
            return batch
        raise RuntimeError("the loader of steps() has ended, and the sampler never does: give it a DataLoader of it")
