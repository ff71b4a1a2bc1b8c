"""The loss scale's arithmetic, over any history of overflows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.engine.config.models import Fp16Config
from thinwire.engine.loss_scale import DynamicLossScale, FixedLossScale, NonFiniteError, make_loss_scale


def test_what_the_configuration_asks_for() -> None:
    assert make_loss_scale(Fp16Config(), 1) is None
    fixed = make_loss_scale(Fp16Config(enabled=True, loss_scale=128), 1)
    assert isinstance(fixed, FixedLossScale)
    assert fixed.value == 128
    dynamic = make_loss_scale(Fp16Config(enabled=True), 1)
    assert isinstance(dynamic, DynamicLossScale)
    assert dynamic.value == 65536


def values(scale: DynamicLossScale, overflows: str) -> list[float]:
    result = []
    for overflow in overflows:
        scale.update(overflow == "x")
        result.append(scale.value)
    return result


def test_it_doubles_after_a_window_of_good_steps() -> None:
    assert values(DynamicLossScale(8, 3, 1, 1), ".......") == [8, 8, 8, 16, 16, 16, 32]
    assert values(DynamicLossScale(8, 3, 1, 1), "..x....") == [8, 8, 4, 4, 4, 4, 8]


def test_the_first_good_step_does_not_count_whatever_the_window() -> None:
    assert values(DynamicLossScale(8, 1, 1, 1), "...x..") == [8, 16, 32, 16, 16, 32]


def test_hysteresis_is_used_up_once_and_forgiven_by_a_window() -> None:
    assert values(DynamicLossScale(64, 2, 3, 1), "xxxx...xxx") == [64, 64, 32, 16, 16, 16, 32, 32, 32, 16]
    assert values(DynamicLossScale(64, 3, 2, 1), "x.x.x") == [64, 64, 32, 32, 16]


def test_hysteresis_of_overflows_in_a_row() -> None:
    scale = DynamicLossScale(64, 9, 2, 1, forgives_at_once=True)
    assert values(scale, "x.x.xx.x") == [64, 64, 64, 64, 64, 32, 32, 32]


def test_stage_0_goes_on_at_the_minimum_and_halves_at_once() -> None:
    config = Fp16Config(enabled=True, initial_scale_power=2, min_loss_scale=1.0)
    scale = make_loss_scale(config, 0)
    assert isinstance(scale, DynamicLossScale)
    assert values(scale, "xxx" + "x" * 18) == [2, *[1] * 20]
    with pytest.warns(RuntimeWarning, match="20 steps in a row were skipped: gradients overflow in fp16 even at the"):
        scale.update(True)
    assert (scale.value, scale.iterations) == (1, 22)
    asked = make_loss_scale(config.model_copy(update={"hysteresis": 3}), 0)
    assert isinstance(asked, DynamicLossScale)
    assert values(asked, "xxxx") == [4, 4, 2, 1]


def test_it_stops_at_the_minimum() -> None:
    scale = DynamicLossScale(6, 10, 1, 4)
    assert values(scale, "x") == [4]
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="smallest loss scale, 4"):
            scale.update(True)
    assert scale.value == 4


@given(
    st.lists(st.booleans(), max_size=60),
    st.integers(0, 60),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_a_copy_goes_on_alike(overflows, cut, window, hysteresis) -> None:
    one, other = (DynamicLossScale(2.0**70, window, hysteresis, 1.0) for _ in range(2))
    for overflow in overflows[:cut]:
        one.update(overflow)
    other.load(one.state())
    for overflow in overflows[cut:]:
        one.update(overflow)
        other.update(overflow)
        assert one.value == other.value


def test_a_fixed_scale_and_a_dynamic_one_take_up_each_others_checkpoints() -> None:
    dynamic, fixed = DynamicLossScale(32, 3, 2, 1), FixedLossScale(4)
    values(dynamic, "xx")
    fixed.load(dynamic.state())
    assert fixed.value == 4
    fresh = DynamicLossScale(32, 3, 2, 1)
    fresh.load(fixed.state())
    assert values(fresh, "xx") == [32, 16]


def test_a_fixed_scale_that_the_loss_cannot_hold() -> None:
    scale = FixedLossScale(65536.0)
    with pytest.raises(ValueError, match="cannot hold the fixed loss scale 65536"):
        scale.check(torch.float16)
    scale.check(torch.float32)
    FixedLossScale(128.0).check(torch.float16)


def test_a_fixed_scale_warns_of_many_overflows_in_a_row() -> None:
    scale = FixedLossScale(1024.0)
    for _ in range(19):
        scale.update(overflow=True)
    with pytest.warns(RuntimeWarning, match="20 steps in a row overflowed"):
        scale.update(overflow=True)
