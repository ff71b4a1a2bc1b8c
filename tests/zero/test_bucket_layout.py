"""Buckets and shards: every parameter in exactly one place, every element with exactly one owner."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusing import refused
from thinwire.compress.packet_layout import shard_numel, valid_in_shard
from thinwire.zero import bucket_numel, partition
from thinwire.zero.bucket_layout import partition_whole

MODELS = given(
    numels=st.lists(st.integers(0, 5000), max_size=40),
    world_size=st.integers(1, 9),
    block_size=st.sampled_from([1, 64, 2048]),
    bucket_numel=st.integers(1, 8000),
    data=st.data(),
)


@MODELS
def test_every_parameter_lies_in_one_place(numels, world_size, block_size, bucket_numel, data) -> None:
    order = data.draw(st.permutations(range(len(numels))))
    layouts = partition(numels, order, world_size=world_size, block_size=block_size, bucket_numel=bucket_numel)
    assert [slot.parameter for layout in layouts for slot in layout.slots] == list(order)
    for layout in layouts:
        offset = 0
        for slot in layout.slots:
            assert (slot.offset, slot.numel) == (offset, numels[slot.parameter])
            offset += slot.numel
        assert layout.numel == offset <= layout.padded_numel == world_size * layout.shard
        assert layout.shard % block_size == 0
        assert sum(layout.filled) == -(-layout.numel // block_size) * block_size
        assert layout.numel <= bucket_numel or sum(slot.numel > 0 for slot in layout.slots) == 1


@MODELS
def test_every_whole_parameter_has_one_owner(numels, world_size, block_size, bucket_numel, data) -> None:
    order = data.draw(st.permutations(range(len(numels))))
    layouts = partition_whole(numels, order, world_size=world_size, block_size=block_size, bucket_numel=bucket_numel)
    assert [slot.parameter for layout in layouts for slot in layout.slots] == list(order)
    for layout in layouts:
        assert layout.numel == layout.padded_numel == world_size * layout.shard
        assert layout.shard % block_size == 0
        filled = [False] * layout.padded_numel
        for slot in layout.slots:
            assert slot.numel == numels[slot.parameter]
            owners = {one // layout.shard for one in (slot.offset, slot.offset + slot.numel - 1) if slot.numel}
            assert len(owners) <= 1
            assert not any(filled[slot.offset : slot.offset + slot.numel])
            filled[slot.offset : slot.offset + slot.numel] = [True] * slot.numel
        shards = [filled[first : first + layout.shard] for first in range(0, layout.numel, layout.shard)]
        assert [-(-sum(one) // block_size) * block_size for one in shards] == layout.filled, "gaps lie at shards' ends"
        for gap in layout.gaps:
            assert not any(filled[gap])
            filled[gap] = [True] * (gap.stop - gap.start)
        assert all(filled)


def test_owners_of_whole_parameters_have_about_as_much() -> None:
    """Twelve layers of a transformer and an embedding as large as six of them."""
    layer = [768 * 3072, 3072, 3072 * 768, 768, 768 * 2304, 2304, 768 * 768, 768]
    numels = [30522 * 768, *layer * 12]
    order = range(len(numels) - 1, -1, -1)
    for world_size in (1, 2, 3, 4):
        layouts = partition_whole(numels, order, world_size=world_size, block_size=2048, bucket_numel=4 << 20)
        assert sum(layout.padded_numel for layout in layouts) < 1.25 * sum(numels) + len(layouts) * 2048 * world_size
        assert len(layouts) > 1
        owned = [0] * world_size
        for layout in layouts:
            for slot in layout.slots:
                owned[slot.offset // layout.shard] += slot.numel
        assert max(owned) < 1.15 * sum(numels) / world_size
    assert len(partition_whole([10**6, 3], [1, 0], world_size=4, block_size=1, bucket_numel=1)) == 1


@given(numel=st.integers(0, 10**6), world_size=st.integers(1, 64), multiple=st.integers(1, 5000))
def test_shards_hold_everything_and_waste_less_than_a_block_each(numel, world_size, multiple) -> None:
    shard = shard_numel(numel, world_size, multiple)
    assert shard % multiple == 0
    assert sum(valid_in_shard(numel, shard, owner) for owner in range(world_size)) == numel
    assert shard * world_size - numel < multiple * world_size or shard == multiple


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((lambda of=of: shard_numel(*of), "shard_numel needs") for of in ((-1, 2, 64), (10, 0, 64), (10, 2, 0))),
        (lambda: partition([3], [0], world_size=1, block_size=64, bucket_numel=0), "bucket_numel must be at least 1"),
    ],
)
def test_impossible_buckets_are_refused(make, message) -> None:
    refused(ValueError, message, make)


@pytest.mark.parametrize(
    ("numel", "itemsize", "expected"),
    [(0, 4, 1 << 20), (8 << 20, 4, 1 << 20), (16 << 20, 4, 2 << 20), (16 << 20, 2, 2 << 20), (1 << 30, 4, 4 << 20)],
)
def test_buckets_are_an_eighth_of_the_model_from_4_to_16_mib(numel: int, itemsize: int, expected: int) -> None:
    assert bucket_numel(None, numel, itemsize) == expected
    assert bucket_numel(100, numel, itemsize) == 100 // itemsize
    assert bucket_numel(1, numel, itemsize) == 1
