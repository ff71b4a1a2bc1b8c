"""What goes wrong in a step is told on every rank, moves nothing, and leaves the engine usable; the arithmetic of the
loss scale."""

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.tiny import BF16, batch, equal, loss_of, make_engine, settings, train, weights
from tests.launching import on_threads
from tests.pairwise import pairwise
from tests.refusing import refused
from thinwire.engine import NonFiniteError
from thinwire.engine.config.models import Fp16Config
from thinwire.engine.loss_scale import DynamicLossScale, FixedLossScale, make_loss_scale


def test_calls_out_of_order() -> None:
    engine = make_engine(None, settings())
    refused(RuntimeError, r"step\(\) was called without backward", engine.step)
    loss = loss_of(engine, 0, 0)
    engine.backward(loss)
    refused(RuntimeError, r"called twice without step\(\)", engine.backward, loss_of(engine, 0, 1))
    engine.step()
    refused(RuntimeError, "with this loss before", engine.backward, loss)
    refused(RuntimeError, "without backward", engine.step)
    assert train(engine, range(2))


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (1.0, TypeError, "got float"),
        (torch.ones(3, requires_grad=True), ValueError, r"torch.float32 of shape \(3,\)"),
        (torch.tensor(1), ValueError, "torch.int64"),
        (torch.tensor(1.0), ValueError, "has no graph"),
        (torch.zeros(0, requires_grad=True), ValueError, r"shape \(0,\)"),
    ],
)
def test_bad_losses(loss, error, message) -> None:
    engine = make_engine(None, settings())
    refused(error, message, engine.backward, loss)
    assert train(engine, range(1))


@pytest.mark.parametrize(("stage", "precision", "poison"), pairwise([0, 1, 2], [{}, BF16], [math.nan, math.inf]))
@on_threads(3)
def test_a_loss_that_is_not_finite(comm, stage, precision, poison) -> None:
    engine = make_engine(comm, settings(stage, gradient_accumulation_steps=2, **precision))
    train(engine, range(3))
    before, rates = weights(engine.module), engine.get_lr()
    for micro in (0, 1):
        loss = loss_of(engine, comm.rank, micro)
        # An added constant leaves the gradients finite.
        engine.backward(loss + poison if comm.rank in (0, 2) and micro == 0 else loss)
        if micro == 0:
            engine.step()
    refused(NonFiniteError, "step 4: the loss was not finite on ranks 0, 2", engine.step)
    assert equal(weights(engine.module), before)
    assert (engine.skipped_steps, engine.was_step_applied(), engine.get_lr()) == (1, False, rates)
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    assert all(math.isfinite(loss) for loss in train(engine, range(3, 6)))
    assert not equal(weights(engine.module), before)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_bf16_skips_such_steps_where_it_is_told_to(comm, stage) -> None:
    engine = make_engine(comm, settings(stage, bf16={"enabled": True, "check_grad_overflow": True}))
    train(engine, range(2))
    before = weights(engine.module)
    engine.backward(loss_of(engine, comm.rank, 2) * (math.nan if comm.rank else 1.0))
    engine.step()
    assert (engine.was_step_applied(), engine.skipped_steps, engine.global_steps) == (False, 1, 3)
    assert equal(weights(engine.module), before)
    assert all(math.isfinite(loss) for loss in train(engine, range(3, 5)))
    assert engine.skipped_steps == 1


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_an_overflow_skips_the_step_on_every_rank(comm, stage) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 2, "loss_scale_window": 4}
    schedule = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.9}}
    engine = make_engine(comm, settings(stage, fp16=fp16, scheduler=schedule))
    scales, applied = [], []
    for step in range(10):
        before, rates = weights(engine.module), engine.get_lr()
        loss = loss_of(engine, comm.rank, step)
        engine.backward(loss * 1e30 if step in (1, 2, 3) and comm.rank == 1 else loss)
        engine.step()
        scales.append(engine.optimizer.loss_scale)
        applied.append(engine.was_step_applied())
        assert equal(weights(engine.module), before) != applied[-1]
        assert (engine.get_lr() == rates) != applied[-1]
    assert applied == [step not in (1, 2, 3) for step in range(10)]
    assert engine.skipped_steps == 3
    # The first overflow is let pass, the next two halve; four good steps after a first one double.
    assert scales == [256, 256, 128, 64, 64, 64, 64, 64, 128, 128]


@pytest.mark.parametrize("stage", [0, 1])
@on_threads(2)
def test_an_overflow_at_the_smallest_scale(comm, stage) -> None:
    """An error but at stage 0, which goes on skipping."""
    fp16 = {"enabled": True, "initial_scale_power": 1} | ({"hysteresis": 1} if stage else {})
    engine = make_engine(comm, settings(stage, fp16=fp16))
    before = weights(engine.module)
    for step in range(2 if stage else 4):
        engine.backward(loss_of(engine, comm.rank, step) * (math.inf if comm.rank == 1 else 1))
        if stage and step:
            refused(NonFiniteError, "smallest loss scale, 1", engine.step)
        else:
            engine.step()
    assert equal(weights(engine.module), before)
    assert (engine.skipped_steps, engine.optimizer.loss_scale) == (2 if stage else 4, 1)
    assert train(engine, range(2))
    assert engine.skipped_steps == (2 if stage else 4)


def test_a_loss_beyond_fp16_counts_where_its_gradients_are_finite() -> None:
    fp16 = {"enabled": True, "loss_scale": 8}
    engine, other = (make_engine(None, settings(1, fp16=fp16)) for _ in range(2))
    for step in range(2):
        loss = engine(batch(0, step)[0]).sum()
        assert loss.dtype == torch.float16
        other.backward(other(batch(0, step)[0]).sum())
        engine.backward(loss + torch.tensor(math.inf, dtype=torch.float16))
        with warnings.catch_warnings() if step else pytest.warns(RuntimeWarning, match="the loss of this step is inf"):
            warnings.simplefilter("error" if step else "always")  # it is said once
            engine.step()
        other.step()
    assert engine.skipped_steps == 0
    assert equal(weights(engine.module), weights(other.module))
    engine.backward(engine(batch(0, 2)[0]).sum() * math.nan)
    engine.step()
    assert (engine.skipped_steps, engine.optimizer.loss_scale) == (1, 8)


def values(scale: DynamicLossScale, overflows: str) -> list[float]:
    result = []
    for overflow in overflows:
        scale.update(overflow == "x")
        result.append(scale.value)
    return result


@pytest.mark.parametrize(
    ("scale", "overflows", "expected"),
    [
        # Doubled after a window of good steps; the first does not count, whatever the window.
        ((8, 3, 1, 1), ".......", [8, 8, 8, 16, 16, 16, 32]),
        ((8, 3, 1, 1), "..x....", [8, 8, 4, 4, 4, 4, 8]),
        ((8, 1, 1, 1), "...x..", [8, 16, 32, 16, 16, 32]),
        # Hysteresis is used up once, and forgiven by a window.
        ((64, 2, 3, 1), "xxxx...xxx", [64, 64, 32, 16, 16, 16, 32, 32, 32, 16]),
        ((64, 3, 2, 1), "x.x.x", [64, 64, 32, 32, 16]),
    ],
)
def test_values(scale: tuple[int, ...], overflows: str, expected: list[float]) -> None:
    assert values(DynamicLossScale(*scale), overflows) == expected


def test_hysteresis_of_overflows_in_a_row() -> None:
    scale = DynamicLossScale(64, 9, 2, 1, forgives_at_once=True)
    assert values(scale, "x.x.xx.x") == [64, 64, 64, 64, 64, 32, 32, 32]


def test_stage_0_goes_on_at_the_minimum_and_halves_at_once() -> None:
    config = Fp16Config(enabled=True, initial_scale_power=2, min_loss_scale=1.0)
    scale = make_loss_scale(config, 0)
    assert values(scale, "xxx" + "x" * 18) == [2, *[1] * 20]
    with pytest.warns(RuntimeWarning, match="20 steps in a row were skipped: gradients overflow in fp16 even at the"):
        scale.update(True)
    assert (scale.value, scale.iterations) == (1, 22)
    assert values(make_loss_scale(config.model_copy(update={"hysteresis": 3}), 0), "xxxx") == [4, 4, 2, 1]


def test_it_stops_at_the_minimum() -> None:
    scale = DynamicLossScale(6, 10, 1, 4)
    assert values(scale, "x") == [4]
    for _ in range(2):
        refused(NonFiniteError, "smallest loss scale, 4", scale.update, True)
    assert scale.value == 4


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 60), st.integers(1, 5), st.integers(1, 4))
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
    refused(ValueError, "cannot hold the fixed loss scale 65536", scale.check, torch.float16)
    scale.check(torch.float32)
    FixedLossScale(128.0).check(torch.float16)


def test_a_fixed_scale_warns_of_many_overflows_in_a_row() -> None:
    scale = FixedLossScale(1024.0)
    for _ in range(19):
        scale.update(overflow=True)
    with pytest.warns(RuntimeWarning, match="20 steps in a row overflowed"):
        scale.update(overflow=True)
