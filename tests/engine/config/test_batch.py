"""Batch sizes: any two give the third, one alone what DeepSpeed makes of it, and what is refused says what works."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.engine.config import ConfigError, load_config
from thinwire.engine.config.rules import BatchSizes, complete_batch_sizes

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
sizes = st.integers(1, 64)
optional_sizes = st.none() | st.integers(1, 40)


@settings(deadline=None)
@given(micro=sizes, accumulation=sizes, world_size=sizes)
def test_any_two_give_the_third(micro: int, accumulation: int, world_size: int) -> None:
    train = micro * accumulation * world_size
    expected = BatchSizes(train, micro, accumulation)
    assert complete_batch_sizes(None, micro, accumulation, world_size) == expected
    assert complete_batch_sizes(train, None, accumulation, world_size) == expected
    assert complete_batch_sizes(train, micro, None, world_size) == expected
    assert complete_batch_sizes(train, micro, accumulation, world_size) == expected


@settings(deadline=None)
@given(micro=sizes, world_size=sizes)
def test_one_alone_takes_one_forward_a_step(micro: int, world_size: int) -> None:
    expected = BatchSizes(micro * world_size, micro, 1)
    assert complete_batch_sizes(None, micro, None, world_size) == expected
    assert complete_batch_sizes(micro * world_size, None, None, world_size) == expected


@settings(deadline=None)
@given(train=optional_sizes, micro=optional_sizes, accumulation=optional_sizes, world_size=st.integers(1, 9))
def test_what_comes_back_multiplies_out_and_what_does_not_names_what_would(
    train: int | None, micro: int | None, accumulation: int | None, world_size: int
) -> None:
    sizes = dict(zip(KEYS, (train, micro, accumulation), strict=True))
    if train is None and micro is None:
        return
    try:
        found = complete_batch_sizes(*sizes.values(), world_size)
    except ConfigError as error:
        for key, number in suggestions(str(error)):
            assert complete_batch_sizes(*(sizes | {key: number}).values(), world_size)
        return
    assert found.train == found.micro * found.accumulation * world_size
    for was, now in zip(sizes.values(), (found.train, found.micro, found.accumulation), strict=True):
        assert was in (None, now)


def suggestions(message: str) -> list[tuple[str, int]]:
    """(key, size) for each way out that a refusal names; there is always one."""
    found = [("train_batch_size", int(size)) for size in re.findall(r"\d+", message.partition("that works is")[2])]
    for way in filter(None, message.partition("or one of ")[2].split(", ")):
        key, size = way.split()
        found.append((key, int(size)))
    assert found
    return found


def test_a_conflict_shows_the_arithmetic_and_each_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        complete_batch_sizes(64, 4, 2, 4)
    assert "64 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x 4 ranks = 32" in str(
        caught.value
    )
    for way in ("train_batch_size 32", "gradient_accumulation_steps 4", "train_micro_batch_size_per_gpu 8"):
        assert way in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        complete_batch_sizes(65, 4, 2, 4)
    assert str(caught.value).endswith("one of train_batch_size 32")


@pytest.mark.parametrize(
    ("given_sizes", "world_size", "message"),
    [
        ((100, 8, None), 4, "not a multiple of train_micro_batch_size_per_gpu 8 x 4 ranks = 32, .* 96 or 128"),
        ((3, None, None), 4, "gradient_accumulation_steps 1 x 4 ranks = 4, .* 0.75 samples a micro-batch: .* is 4"),
        ((10, None, 3), 1, "gradient_accumulation_steps 3 x 1 rank = 3, .* 9 or 12"),
        ((None, None, None), 2, "the batch size is missing: give train_batch_size or"),
        ((None, None, 4), 2, "the batch size is missing: .* beside gradient_accumulation_steps"),
    ],
)
def test_what_cannot_work_is_told(given_sizes: tuple[int | None, ...], world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        complete_batch_sizes(*given_sizes, world_size)


@settings(deadline=None)
@given(micro=st.integers(1, 20), accumulation=st.integers(1, 20), world_size=st.integers(1, 20))
def test_sizes_follow_from_the_others(micro: int, accumulation: int, world_size: int) -> None:
    config = load_config(
        {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": float(accumulation),
        },
        world_size,
    )
    assert config.train_batch_size == micro * accumulation * world_size
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (micro, accumulation)


@pytest.mark.parametrize("size", [0, -4, 1.5, "8", True, float("nan")])
def test_a_size_that_is_no_whole_number(size: object) -> None:
    with pytest.raises(ConfigError, match='"train_batch_size" must be a whole number, at least 1, got'):
        load_config({"train_batch_size": size}, 2)


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True])
def test_a_world_size_that_is_none(world_size: object) -> None:
    with pytest.raises(ConfigError, match="world_size"):
        load_config({"train_batch_size": 4}, world_size)  # type: ignore[arg-type]


def test_a_loaded_configuration_is_checked_for_another_number_of_ranks() -> None:
    config = load_config({"train_batch_size": 8}, 2)
    assert load_config(config, 2) == config
    with pytest.raises(ConfigError, match="= 16"):
        load_config(config, 4)
