"""What goes wrong in a step is told on every rank, moves nothing, and leaves the engine usable."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from tests.engine.tiny import batch, loss_of, make_engine, settings, train
from thinwire.comm import threads
from thinwire.engine import NonFiniteError


def everything(engine):
    return torch.cat([parameter.detach().float().reshape(-1) for parameter in engine.module.parameters()])


def test_calls_out_of_order() -> None:
    engine = make_engine(None, settings())
    with pytest.raises(RuntimeError, match=r"step\(\) was called without backward"):
        engine.step()
    loss = loss_of(engine, 0, 0)
    engine.backward(loss)
    with pytest.raises(RuntimeError, match=r"called twice without step\(\)"):
        engine.backward(loss_of(engine, 0, 1))
    engine.step()
    with pytest.raises(RuntimeError, match="with this loss before"):
        engine.backward(loss)
    with pytest.raises(RuntimeError, match="without backward"):
        engine.step()
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
    with pytest.raises(error, match=message):
        engine.backward(loss)
    assert train(engine, range(1))


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(precision, stage, poison) -> None:
    def body(comm):
        engine = make_engine(comm, settings(stage, gradient_accumulation_steps=2, **precision))
        train(engine, range(3))
        before, rates = everything(engine), engine.get_lr()
        for micro in (0, 1):
            loss = loss_of(engine, comm.rank, micro)
            # An added constant leaves the gradients finite.
            engine.backward(loss + poison if comm.rank in (0, 2) and micro == 0 else loss)
            if micro == 0:
                engine.step()
        with pytest.raises(NonFiniteError, match="step 4: the loss was not finite on ranks 0, 2"):
            engine.step()
        assert torch.equal(everything(engine), before)
        assert (engine.skipped_steps, engine.was_step_applied(), engine.get_lr()) == (1, False, rates)
        assert all(parameter.grad is None for parameter in engine.module.parameters())
        assert all(math.isfinite(loss) for loss in train(engine, range(3, 6)))
        assert not torch.equal(everything(engine), before)

    threads.run(body, 3)


def test_a_gradient_that_is_not_finite() -> None:
    def body(comm):
        engine = make_engine(comm, settings())
        inputs, _ = batch(comm.rank, 0)
        # sqrt's slope at zero
        engine.backward((engine(inputs) * (comm.rank == 1) * 0).abs().sqrt().sum())
        with pytest.raises(NonFiniteError, match="every rank's loss was finite"):
            engine.step()
        assert train(engine, range(2))

    threads.run(body, 2)


def test_an_overflow_skips_the_step_on_every_rank() -> None:
    def body(comm, stage):
        fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 2, "loss_scale_window": 4}
        schedule = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.9}}
        engine = make_engine(comm, settings(stage, fp16=fp16, scheduler=schedule))
        scales, applied = [], []
        for step in range(10):
            before, rates = everything(engine), engine.get_lr()
            loss = loss_of(engine, comm.rank, step)
            engine.backward(loss * 1e30 if step in (1, 2, 3) and comm.rank == 1 else loss)
            engine.step()
            scales.append(engine.optimizer.loss_scale)
            applied.append(engine.was_step_applied())
            assert torch.equal(everything(engine), before) != applied[-1]
            assert (engine.get_lr() == rates) != applied[-1]
        assert applied == [step not in (1, 2, 3) for step in range(10)]
        assert engine.skipped_steps == 3
        # The first overflow is let pass, the next two halve; four good steps after a first one double.
        assert scales == [256, 256, 128, 64, 64, 64, 64, 64, 128, 128]

    for stage in (0, 1, 2):
        threads.run(lambda comm, stage=stage: body(comm, stage), 2)


def test_an_overflow_at_the_smallest_scale() -> None:
    def body(comm):
        fp16 = {"enabled": True, "initial_scale_power": 1, "hysteresis": 1}
        engine = make_engine(comm, settings(fp16=fp16))
        for step in range(2):
            engine.backward(loss_of(engine, comm.rank, step) * math.inf)
            if step == 0:
                engine.step()
        with pytest.raises(NonFiniteError, match="smallest loss scale, 1"):
            engine.step()
        assert train(engine, range(2))

    threads.run(body, 2)


def test_stage_0_goes_on_skipping_at_the_smallest_scale() -> None:
    def body(comm):
        fp16 = {"enabled": True, "initial_scale_power": 1}
        engine = make_engine(comm, settings(0, fp16=fp16))
        before = everything(engine)
        for step in range(4):
            engine.backward(loss_of(engine, comm.rank, step) * (math.inf if comm.rank == 1 else 1))
            engine.step()
        assert torch.equal(everything(engine), before)
        assert (engine.skipped_steps, engine.optimizer.loss_scale) == (4, 1)
        assert train(engine, range(2))
        assert engine.skipped_steps == 4

    threads.run(body, 2)


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
    assert torch.equal(everything(engine), everything(other))
    engine.backward(engine(batch(0, 2)[0]).sum() * math.nan)
    engine.step()
    assert engine.skipped_steps == 1


def test_a_fixed_scale_skips_and_stays() -> None:
    engine = make_engine(None, settings(fp16={"enabled": True, "loss_scale": 64}))
    for step in range(4):
        engine.backward(loss_of(engine, 0, step) * (math.nan if step < 3 else 1))
        engine.step()
    assert (engine.skipped_steps, engine.optimizer.loss_scale) == (3, 64)
