"""A job's data: a distributed loader that knows where it is, and loaders without end.

The loader is torch's DataLoader over an order of samples, a function of the seed and the position alone, with a
position that any later job can go on from, on other ranks and with other batch sizes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from thinwire.comm import Communicator
from thinwire.comm.agreement import first_difference, on_every_rank
from thinwire.engine.config import EngineConfig

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


# The loader


class ResumableLoader:
    """Batches of a map-style dataset for this rank; `for batch in loader` is the rest of the current epoch.

    Every step takes the next `micro_batch_size` · ranks samples of the epoch's order, and deals them to the ranks.
    The position counts the samples that all ranks together were handed in this epoch; what workers have fetched ahead
    does not count. An abandoned loop goes on where it stopped. `epoch`: the current one, from 0; it ends when the loop
    over it does. `consumed`: samples of it that all ranks together have been handed.

    What `dataset` and `collate_fn` draw from Python's, numpy's or torch's CPU generator depends only on the seed, the
    position and the rank: it is the same with any number of workers and after a resume, and does not disturb the
    model's own random numbers.

    Args:
        dataset: has `__len__` and `__getitem__` (or `__getitems__`, which gets a list of indices).
        micro_batch_size: samples a rank gets at a time.
        comm: the ranks to deal to. Construction is collective.
        shuffle: a new order each epoch, else that of the dataset.
        seed: of the order, not negative; the same on every rank.
        drop_last: leave out what does not fill a global batch at an epoch's end. Else every rank gets one smaller
            batch, all of one size, for which up to ranks - 1 samples from the epoch's start are handed out again.
        collate_fn: makes a batch of a list of samples; by default torch's, which stacks tensors.
        num_workers: processes that fetch ahead; 0 fetches in this one.
        pin_memory: hand out page-locked tensors, for faster copies to a GPU.

    Raises TypeError for a dataset without length or random access, ValueError for numbers that cannot work, on every
    rank.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        micro_batch_size: int,
        comm: Communicator,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:

        def check() -> int:
            samples = _checked_length(dataset)
            if micro_batch_size < 1:
                raise ValueError(f"micro_batch_size must be at least 1, not {micro_batch_size}")
            if seed < 0 or num_workers < 0:
                raise ValueError(f"seed and num_workers must not be negative, not {seed} and {num_workers}")
            if samples == 0:
                raise ValueError("the dataset is empty")
            if drop_last and samples < micro_batch_size * comm.size:
                raise ValueError(
                    f"{samples} samples do not fill one global batch of {micro_batch_size * comm.size} "
                    f"({micro_batch_size} on each of {comm.size} ranks): use a smaller micro batch, fewer ranks, or "
                    "drop_last=False"
                )
            return samples

        samples = on_every_rank(comm, check, "build its data loader", (TypeError, ValueError))
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self._comm = comm
        order = SampleOrder(samples, shuffle, seed)
        self._order = asdict(order)
        self._dealer = Dealer(order, micro_batch_size, comm.size, drop_last)
        _check_same(comm, "data loaders", {"micro_batch_size": micro_batch_size, "drop_last": drop_last, **self._order})
        self.epoch = 0
        self.consumed = 0
        self._loop = 0
        self._fetching: DataLoader[Any] = DataLoader(
            _Batches(dataset, collate_fn or default_collate),
            batch_size=None,
            sampler=_Remaining(self),
            collate_fn=_as_it_is,
            num_workers=num_workers,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else a loop would draw from the one that the model's dropout draws from
        )

    def __len__(self) -> int:
        """Batches that a rank gets in a whole epoch."""
        whole, rest = divmod(self._dealer.order.samples, self._dealer.global_batch)
        return whole + int(rest > 0 and not self._dealer.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the current epoch, then begin the next one.

        The loop raises RuntimeError when another one, or `load_state`, has moved the position since it began.
        """
        self._loop += 1
        return self._run(self._loop)

    def repeat(self) -> Iterator[Any]:
        """Yield batches without end, epoch after epoch."""
        while True:
            yield from self

    def state(self) -> dict[str, Any]:
        """The position, JSON-able and the same on every rank: `load_state` goes on from it in any job."""
        return {"epoch": self.epoch, "consumed": self.consumed, **self._order}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on after the samples that `state` has seen, whatever ranks and micro batch size it was saved with.

        Collective. Raises ValueError, on every rank, for the state of another order of samples, whose position means
        nothing here.
        """
        on_every_rank(self._comm, lambda: self.check_state(state), "load its data position", (ValueError,))
        _check_same(self._comm, "data positions", {key: state[key] for key in ("epoch", "consumed")})
        self.epoch = state["epoch"]
        self.consumed = state["consumed"]
        self._loop += 1

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError where `load_state` would refuse `state`."""
        missing = [key for key in ("epoch", "consumed", *self._order) if key not in state]
        if missing:
            raise ValueError(f"a data position has no {missing}: it must be what ResumableLoader.state() returned")
        for key, mine in self._order.items():
            if state[key] != mine:
                raise ValueError(
                    f"the data position was saved with {key} {state[key]}, this loader has {mine}: the samples are in "
                    f"another order. Build the loader with the saved {key}, or begin the data anew: "
                    "load_checkpoint(..., load_data_position=False)"
                )
        epoch, consumed = state["epoch"], state["consumed"]
        if not (isinstance(epoch, int) and isinstance(consumed, int) and epoch >= 0):
            raise ValueError(f"a data position must be whole numbers, not epoch {epoch!r}, consumed {consumed!r}")
        if not 0 <= consumed <= state["samples"]:
            raise ValueError(f"a data position of {consumed} does not lie in an epoch of {state['samples']} samples")

    def _run(self, loop: int) -> Iterator[Any]:
        for batch in self._fetching if self._dealer.has_batch(self.consumed) else ():
            self._check_current(loop)
            self.consumed = self._dealer.advance(self.consumed)
            yield batch
        self._check_current(loop)
        self.epoch += 1
        self.consumed = 0

    def _check_current(self, loop: int) -> None:
        if loop != self._loop:
            raise RuntimeError(
                "this loop over the data is out of date: another loop was begun, or a position was loaded, since. A "
                "loader has one position; begin a new loop, or build a second ResumableLoader"
            )


@dataclass(frozen=True)
class _Remaining:
    """What a loader still has to fetch in its epoch, as the sampler of a DataLoader."""

    loader: ResumableLoader

    def __iter__(self) -> Iterator[RankBatch]:
        loader = self.loader
        return loader._dealer.batches(loader.epoch, loader.consumed, loader._comm.rank)


@dataclass(frozen=True)
class _Batches(Dataset[Any]):
    """A dataset whose items are whole batches, made in the worker with their own random numbers."""

    dataset: Any
    collate: Callable[[list[Any]], Any]

    def __getitem__(self, batch: RankBatch) -> Any:
        with seeded(batch.seed):
            if hasattr(self.dataset, "__getitems__"):
                samples = self.dataset.__getitems__(batch.indices)
            else:
                samples = [self.dataset[index] for index in batch.indices]
            return self.collate(samples)


def _as_it_is(batch: Any) -> Any:
    return batch


def _checked_length(dataset: Any) -> int:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{kind} can only be read from its start, so a position in it cannot be resumed: give a dataset with "
            "__getitem__ and __len__, or loop over your own torch DataLoader and skip what was seen"
        )
    try:
        return len(dataset)
    except TypeError as error:
        raise TypeError(f"{kind} has no length ({error}): give it a __len__, which an epoch's order needs") from error


def _check_same(comm: Communicator, what: str, mine: Mapping[str, Any]) -> None:
    """Raise ValueError on every rank unless all have the same; collective."""
    if (found := first_difference(comm, mine, "compare data loaders")) is not None:
        rank, name, there, here = found
        raise ValueError(f"ranks have different {what}: {name} is {here!r} on rank 0 and {there!r} on rank {rank}")


def make_loader(
    dataset: Any,
    config: EngineConfig,
    comm: Communicator,
    device: torch.device,
    *,
    batch_size: int | None = None,
    shuffle: bool = True,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = True,
) -> ResumableLoader:
    """A loader over `dataset` as the configuration says; collective. `batch_size`: of a rank, where not the
    configuration's. Raises what ResumableLoader raises."""
    return ResumableLoader(
        dataset,
        config.train_micro_batch_size_per_gpu if batch_size is None else batch_size,
        comm,
        shuffle=shuffle,
        seed=config.seed,
        drop_last=config.dataloader_drop_last or config.pipeline.stages > 1,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory and device.type == "cuda",
    )


def refuse_elastic_data() -> NoReturn:
    """Raise ValueError: workers come and go, and every one would be dealt the same samples."""
    raise ValueError(
        "a loader of the engine deals samples to the ranks of one worker, and with elastic every worker would read the "
        "same: leave training_data out, and read torch.utils.data.DataLoader(dataset, batch_size, "
        "sampler=thinwire.ElasticSampler(engine.optimizer, len(dataset)))"
    )


_END = object()


class RepeatingLoader:
    """Batches of `loader` without end: where it is through, it begins again, with its next epoch.

    A ResumableLoader knows its epoch by itself; a torch DataLoader's DistributedSampler is told. `loader` is what was
    given, `len` its length.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._epoch = 0
        self._batches = iter(loader)

    def __len__(self) -> int:
        """Batches of one epoch. Raises TypeError where the loader has no length."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch. Raises ValueError for a loader that gives none in a whole epoch."""
        for _ in range(2):
            if (batch := next(self._batches, _END)) is not _END:
                return batch
            self._epoch += 1
            begin_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
            if begin_epoch is not None:
                begin_epoch(self._epoch)
            self._batches = iter(self.loader)
        raise ValueError(
            f"{type(self.loader).__name__} gave no batch in a whole epoch, so it would be repeated for ever: give a "
            "loader with data, and no iterator, which begins only once"
        )
