"""A repeated loader goes on, epoch after epoch, each in its own order where the loader has several."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from thinwire.comm import threads
from thinwire.engine import RepeatingLoader, ResumableLoader


def test_a_list_goes_round() -> None:
    loader = RepeatingLoader([1, 2, 3])
    assert [next(loader) for _ in range(8)] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert len(loader) == 3
    assert iter(loader) is loader


def test_epochs_of_a_resumable_loader_advance() -> None:
    def body(comm):
        loader = ResumableLoader(list(range(7)), 1, comm, seed=3, drop_last=False)
        repeating = RepeatingLoader(loader)
        found = [[int(next(repeating)) for _ in range(len(repeating))] for _ in range(3)]
        assert loader.epoch == 2
        same = ResumableLoader(list(range(7)), 1, comm, seed=3, drop_last=False)
        assert found == [[int(one) for one in same] for _ in range(3)]
        return found

    first, second = threads.run(body, 2)
    for epoch in range(3):
        assert set(first[epoch]) | set(second[epoch]) == set(range(7))
    assert first[0] != first[1]


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
    with pytest.raises(ValueError, match="gave no batch in a whole epoch"):
        list(zip(repeating, range(2), strict=True))
