"""The resumable loader: every sample once an epoch whatever ranks and batch sizes it is split over, and random numbers
that survive a resume; and loaders that are repeated, epoch after epoch."""

import json
import random
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from tests.launching import on_threads
from tests.refusing import refused
from thinwire.comm import CommunicationError, Communicator, threads
from thinwire.engine.data import RepeatingLoader, ResumableLoader, SampleOrder


class Numbers(Dataset):
    """Sample i is i; `noisy` ones come with a draw from each of the three generators."""

    def __init__(self, samples: int, noisy: bool = False) -> None:
        self.samples = samples
        self.noisy = noisy

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> list[float]:
        if index >= self.samples:
            raise IndexError(index)
        return [float(index), float(torch.rand(())), np.random.rand(), random.random()] if self.noisy else [index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class WithoutLength(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


def as_lists(samples: list[list[Any]]) -> list[list[Any]]:
    return samples


def indices(batch: list[list[Any]]) -> list[int]:
    return [int(sample[0]) for sample in batch]


def alone(samples: int, micro: int = 1, **options: Any) -> ResumableLoader:
    return ResumableLoader(Numbers(samples), micro, threads.single(60.0), collate_fn=as_lists, **options)


def go_on(
    samples: int, ranks: int, micro: int, steps: int | None, state: dict[str, Any] | None, **options: Any
) -> tuple[list[list[list[int]]], dict[str, Any]]:
    """What each of `ranks` gets in the next `steps` steps, or to the end of the epoch, and the position after them."""

    def rank(comm: Communicator) -> tuple[list[list[int]], dict[str, Any]]:
        loader = ResumableLoader(Numbers(samples), micro, comm, collate_fn=as_lists, **options)
        if state is not None:
            loader.load_state(json.loads(json.dumps(state)))
        batches: list[list[int]] = []
        if steps == 0:
            return batches, loader.state()
        for batch in loader:
            batches.append(indices(batch))
            if len(batches) == steps:
                break
        return batches, loader.state()

    results = threads.run(rank, ranks)
    states = [after for _, after in results]
    assert all(after == states[0] for after in states)
    return [batches for batches, _ in results], states[0]


def legs(most_ranks: int, most_micro: int) -> st.SearchStrategy[list[tuple[int, int, int | None]]]:
    """Jobs that follow one another: their ranks, micro batch and steps; the last one finishes the epoch."""
    job = st.tuples(st.integers(1, most_ranks), st.integers(1, most_micro))
    stopped = st.lists(st.tuples(job, st.integers(0, 3)), max_size=6)
    return st.tuples(stopped, job).map(lambda jobs: [(*job, steps) for job, steps in jobs[0]] + [(*jobs[1], None)])


@given(legs=legs(4, 9), samples=st.integers(1, 70), shuffle=st.booleans(), seed=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_every_sample_once_whatever_ranks_and_batches_it_is_dealt_to(legs, samples, shuffle, seed) -> None:
    options = {"shuffle": shuffle, "seed": seed, "drop_last": False}
    seen: list[int] = []
    state = None
    for ranks, micro, steps in legs:
        before = 0 if state is None else state["consumed"]
        dealt, state = go_on(samples, ranks, micro, steps, state, **options)
        assert len({len(batches) for batches in dealt}) == 1
        for step in range(len(dealt[0])):
            sizes = {len(batches[step]) for batches in dealt}
            assert len(sizes) == 1
            assert sizes.pop() <= micro
            together = [index for batches in dealt for index in batches[step]]
            new = min(ranks * micro, samples - before)
            assert len(together) - new < ranks  # no more is repeated than it takes to have one batch a rank
            seen += together[:new]
            before += new
        if state["epoch"] == 1:
            break
    assert seen == SampleOrder(samples, shuffle, seed).of(0).tolist()
    assert shuffle or seen == list(range(samples))
    assert sorted(seen) == list(range(samples))
    assert state == {"epoch": 1, "consumed": 0, "samples": samples, "shuffle": shuffle, "seed": seed}


@given(legs=legs(3, 4), samples=st.integers(12, 70))
@settings(max_examples=30, deadline=None)
def test_with_drop_last_none_twice_and_less_than_a_global_batch_left_out(legs, samples) -> None:
    seen: list[int] = []
    state = None
    for ranks, micro, steps in legs:
        dealt, state = go_on(samples, ranks, micro, steps, state, seed=3)
        assert all(len(batch) == micro for batches in dealt for batch in batches)
        seen += [index for step in range(len(dealt[0])) for batches in dealt for index in batches[step]]
        if state["epoch"] == 1:
            break
    assert len(seen) == len(set(seen))
    assert samples - len(seen) < ranks * micro


def test_epochs_follow_one_another() -> None:
    loader = alone(7, 2, drop_last=False, seed=4)
    assert len(loader) == 4
    epochs = [[indices(batch) for batch in loader] for _ in range(3)]
    assert loader.epoch == 3
    assert loader.consumed == 0
    endless = alone(7, 2, drop_last=False, seed=4).repeat()
    assert [indices(next(endless)) for _ in range(12)] == list(chain(*epochs))
    assert epochs[0] != epochs[1]
    assert epochs[0] != [indices(batch) for batch in alone(7, 2, drop_last=False, seed=5)]
    assert [sum(map(len, epoch)) for epoch in epochs] == [7, 7, 7]


def test_an_abandoned_loop_goes_on_where_it_stopped() -> None:
    whole = [indices(batch) for batch in alone(9, 2, drop_last=False)]
    loader = alone(9, 2, drop_last=False)
    assert [indices(next(iter(loader)))] + [indices(batch) for batch in loader] == whole
    assert loader.epoch == 1


def test_a_state_after_the_last_batch_is_still_in_its_epoch() -> None:
    loader = alone(6, 3)
    states = [loader.state() for _ in loader]
    assert [(state["epoch"], state["consumed"]) for state in states] == [(0, 3), (0, 6)]
    again = alone(6, 3)
    again.load_state(states[-1])
    assert list(again) == []
    assert again.epoch == 1
    again.load_state(states[-1])
    assert next(again.repeat()) == next(iter(loader))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_prefetch_without_moving_the_position_and_draw_the_same_numbers(workers: int) -> None:
    def make(count: int) -> ResumableLoader:
        comm = threads.single(60.0)
        return ResumableLoader(Numbers(23, noisy=True), 3, comm, seed=9, collate_fn=as_lists, num_workers=count)

    reference = make(0)
    batches = [*reference, *reference]
    loader = make(workers)
    for position, batch in enumerate(loader):
        assert batch == batches[position]
        assert loader.consumed == 3 * (position + 1)
        if position == 2:
            break
    resumed = make(workers)
    resumed.load_state(loader.state())
    assert [*resumed, *resumed] == batches[3:]
    noise = [tuple(sample[1:]) for batch in batches for sample in batch]
    assert len(set(noise)) == len(noise)


def test_random_collators_are_resumed_and_ranks_draw_different_numbers() -> None:
    def collate(samples: list[list[Any]]) -> torch.Tensor:
        return torch.rand(4)

    def rank(comm: Communicator) -> list[torch.Tensor]:
        return list(ResumableLoader(Numbers(12), 2, comm, collate_fn=collate))

    once, twice = (torch.stack(list(chain(*threads.run(rank, 3)))) for _ in range(2))
    assert torch.equal(once, twice)
    assert len(once.unique()) == once.numel() == 24


@pytest.mark.parametrize("workers", [0, 1])
def test_the_models_random_numbers_are_left_alone(workers: int) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    list(ResumableLoader(Numbers(8, noisy=True), 2, threads.single(60.0), num_workers=workers))
    assert torch.equal(torch.get_rng_state(), state[0])
    assert np.random.get_state()[1].tolist() == state[1]
    assert random.getstate() == state[2]


def test_default_collation_and_getitems() -> None:
    tensors = torch.randn(10, 3)
    batches = list(ResumableLoader(TensorDataset(tensors), 5, threads.single(60.0), shuffle=False))
    assert torch.equal(torch.cat([batch[0] for batch in batches]), tensors)

    class Many(Numbers):
        def __getitems__(self, wanted: list[int]) -> list[int]:
            return [index * 10 for index in wanted]

    (batch,) = ResumableLoader(Many(4), 4, threads.single(60.0), shuffle=False)
    assert batch.tolist() == [0, 10, 20, 30]


def test_fewer_samples_than_ranks_are_repeated() -> None:
    dealt, state = go_on(2, 5, 3, None, None, drop_last=False, shuffle=False)
    assert dealt == [[[0]], [[1]], [[0]], [[1]], [[0]]]
    assert (state["epoch"], state["consumed"]) == (1, 0)


def test_loops_that_are_out_of_date_say_so() -> None:
    loader = alone(9)
    first = iter(loader)
    next(first)
    second = iter(loader)
    refused(RuntimeError, "out of date", next, first)
    next(second)
    loader.load_state(loader.state())
    refused(RuntimeError, "out of date", next, second)
    assert len(list(loader)) == 7


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Stream(), {}, "Stream can only be read from its start"),
        (WithoutLength(), {}, "WithoutLength has no length"),
        (Numbers(0), {"drop_last": False}, "empty"),
        (Numbers(5), {}, r"5 samples do not fill one global batch of 6 \(2 on each of 3 ranks\)"),
        (Numbers(9), {"micro_batch_size": 0}, "micro_batch_size must be at least 1, not 0"),
        (Numbers(9), {"seed": -1}, "must not be negative, not -1"),
    ],
)
@on_threads(3)
def test_bad_input_is_an_error_on_every_rank(comm: Communicator, dataset, options, message) -> None:
    refused((TypeError, ValueError), message, ResumableLoader, dataset, comm=comm, **{"micro_batch_size": 2, **options})
    comm.barrier()


@on_threads(2)
def test_ranks_must_agree(comm: Communicator) -> None:
    refused(ValueError, "ranks have different data loaders", ResumableLoader, Numbers(9 + comm.rank), 1, comm)
    refused(ValueError, r"rank 1 could not build|5 samples", ResumableLoader, Numbers(5 + 4 * (1 - comm.rank)), 3, comm)
    loader = ResumableLoader(Numbers(9), 1, comm)
    with pytest.raises(ValueError, match="ranks have different data positions"):
        loader.load_state({**loader.state(), "consumed": comm.rank})
    assert loader.consumed == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 8}, "saved with samples 8, this loader has 9"),
        ({"seed": 4}, "saved with seed 4, this loader has 0"),
        ({"shuffle": False}, "saved with shuffle False"),
        ({"consumed": 10}, "10 does not lie in an epoch of 9"),
        ({"consumed": -1}, "does not lie"),
        ({"epoch": "3"}, "whole numbers"),
    ],
)
def test_positions_in_another_order_are_refused(change, message) -> None:
    loader = alone(9)
    before = loader.state()
    refused(ValueError, message, loader.load_state, {**before, **change})
    with pytest.raises(ValueError, match=r"no \['consumed'\]"):
        loader.load_state({key: value for key, value in before.items() if key != "consumed"})
    assert loader.state() == before


def test_an_error_in_the_dataset_comes_through() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            raise OSError(f"sample {index} cannot be read")

    def rank(comm: Communicator) -> None:
        dataset = Broken(8) if comm.rank == 1 else Numbers(8)
        for _ in ResumableLoader(dataset, 2, comm):
            comm.barrier()

    refused((OSError, CommunicationError), "cannot be read", threads.run, rank, 2)


def test_a_list_goes_round() -> None:
    loader = RepeatingLoader([1, 2, 3])
    assert [next(loader) for _ in range(8)] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert len(loader) == 3
    assert iter(loader) is loader


def test_a_distributed_sampler_is_told_of_epochs() -> None:
    data = torch.arange(40)
    sampler = DistributedSampler(data, num_replicas=2, rank=0, seed=1)
    repeating = RepeatingLoader(DataLoader(data, batch_size=20, sampler=sampler))
    first, second = next(repeating), next(repeating)
    assert not torch.equal(first, second)
    sampler.set_epoch(1)
    assert second.tolist() == [data[index] for index in sampler]


@pytest.mark.parametrize("empty", [[], iter([1])])
def test_no_end_and_no_batch(empty) -> None:
    repeating = RepeatingLoader(empty)
    refused(ValueError, "gave no batch in a whole epoch", list, zip(repeating, range(2), strict=True))
