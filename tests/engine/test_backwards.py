"""A loss's own backward(), scaled or not, and several backwards a step, train as the engine's one backward does."""

import math
import warnings

import pytest
import torch

from tests.engine.tiny import MICRO, at_stages, equal, loss_of, make_engine, reference, settings, train, weights
from tests.launching import on_threads
from tests.refusing import refused
from thinwire.engine import CallError, NonFiniteError


def train_plainly(engine, steps, scaled=False, through_engine=True) -> list[float]:
    """As `tiny.train`, by losses' own backwards."""
    losses, parts = [], engine.gradient_accumulation_steps()
    for step in steps:
        total = torch.zeros(1)
        for micro in range(parts):
            loss = loss_of(engine if through_engine else engine.module, engine.comm.rank, step * parts + micro)
            (engine.scale(loss) if scaled else loss).backward()
            engine.step()
            total += loss.detach() / parts
        engine.comm.all_reduce(total, op="mean")
        losses.append(float(total))
    return losses


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (3, 2)])
def test_own_backwards_train_as_plain_torch_does(world, accumulation) -> None:
    expected = reference(world, 6, accumulation, max_norm=0.3)

    def body(comm, stage):
        config = settings(stage, gradient_accumulation_steps=accumulation, gradient_clipping=0.3)
        for how in ({}, {"scaled": True}, {"through_engine": False}):
            engine = make_engine(comm, config)
            assert train_plainly(engine, range(6), **how) == pytest.approx(expected, rel=1e-5)
            assert (engine.global_steps, engine.micro_steps) == (6, 6 * accumulation)
            assert engine.global_samples == 6 * world * accumulation * MICRO

    at_stages(body, ranks=world)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("accumulation", [1, 2])
@on_threads(2)
def test_compressed_steps_hear_of_the_scale(comm, stage, accumulation) -> None:
    """Payloads leave during backward, before anybody knows how the gradients in them were scaled."""
    one_bit = {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 3}}
    config = settings(stage, gradient_accumulation_steps=accumulation, gradient_clipping=0.5, optimizer=one_bit)
    expected = train(make_engine(comm, config), range(6))
    assert train_plainly(make_engine(comm, config), range(6)) == pytest.approx(expected, rel=0.02)
    assert train_plainly(make_engine(comm, config), range(6), scaled=True) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1])
@on_threads(2)
def test_nothing_leaves_before_the_boundary(comm, stage) -> None:
    engine = make_engine(comm, settings(stage, gradient_accumulation_steps=3))
    sent = engine.optimizer.bytes_sent
    for micro in range(2):
        loss_of(engine, comm.rank, micro).backward()
        assert engine.optimizer.bytes_sent == sent
        engine.step()
    with engine.no_sync():
        loss_of(engine, comm.rank, 2).backward()
        assert engine.optimizer.bytes_sent == sent
    loss_of(engine, comm.rank, 3).backward()
    engine.end_backward()
    assert engine.optimizer.bytes_sent > sent
    engine.step()
    assert engine.was_step_applied()


def test_fp16_takes_both() -> None:
    def body(comm, stage):
        fp16 = {"enabled": True, "initial_scale_power": 10}
        config = settings(stage, fp16=fp16, gradient_accumulation_steps=2)
        expected = train(make_engine(comm, config), range(6))
        scaled = make_engine(comm, config)
        assert train_plainly(scaled, range(6), scaled=True) == expected
        assert scaled.optimizer.cur_scale == scaled.optimizer.loss_scale == 1024
        plain = make_engine(comm, config)
        assert train_plainly(plain, range(6)) == pytest.approx(expected, rel=0.01)
        assert plain.optimizer.cur_scale == 1024  # not that of the plain gradients

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        at_stages(body)
    said = [one for one in caught if "engine.scale(loss).backward()" in str(one.message)]
    assert len(said) == 3 * 2  # once on each rank


def test_an_overflow_of_gradients_set_by_hand() -> None:
    engine = make_engine(None, settings(0, fp16={"enabled": True, "initial_scale_power": 6, "hysteresis": 1}))
    scales = []
    for value in (math.inf, 1e-3, math.nan):
        for parameter in engine.parameters():
            parameter.grad = torch.full_like(parameter, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.step()
        scales.append((engine.optimizer.cur_scale, engine.optimizer.overflow))
        assert engine.optimizer.loss_scale_config.cur_scale == engine.optimizer.cur_scale
        assert engine.optimizer.loss_scaler.loss_scale == engine.optimizer.cur_scale
    scale = engine.optimizer.loss_scale_config
    assert (scale.dynamic_loss_scale, scale.cur_iter, scale.scale_factor) == (True, 3, 2)
    assert engine.optimizer.dynamic_loss_scale
    assert (scale.scale_window, scale.min_loss_scale) == (1000, 1)
    assert scales == [(32, True), (32, False), (16, True)]
    assert engine.skipped_steps == 2


def test_a_loss_scale_that_stays() -> None:
    for precision, expected in (({}, 1), ({"fp16": {"enabled": True, "loss_scale": 128}}, 128)):
        scale = make_engine(None, settings(**precision)).optimizer.loss_scale_config
        assert (scale.dynamic_loss_scale, scale.cur_scale, scale.cur_iter) == (False, expected, 0)
        with pytest.raises(AttributeError, match="not dynamic has no scale_window"):
            _ = scale.scale_window


@on_threads(2)
def test_what_is_not_finite_is_told_without_a_loss(comm) -> None:
    engine = make_engine(comm, settings(1))
    loss_of(engine, comm.rank, 0).mul(math.nan if comm.rank else 1.0).backward()
    refused(NonFiniteError, "step 1: the averaged gradient is not finite", engine.step)
    assert all(math.isfinite(loss) for loss in train_plainly(engine, range(2)))


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_one_loss_of_several_engines(comm, stage) -> None:
    together = [make_engine(comm, settings(stage), seed) for seed in range(3)]
    apart = [make_engine(comm, settings(stage), seed) for seed in range(3)]
    for step in range(3):
        sum(loss_of(engine, comm.rank, step) / (1 + n) for n, engine in enumerate(together)).backward()
        for engine in together:
            engine._backward_epilogue()
        for engine in together:
            engine.step()
            engine.optimizer.zero_grad()
        for n, engine in enumerate(apart):
            engine.backward(loss_of(engine, comm.rank, step) / (1 + n))
            engine.step()
    for one, other in zip(together, apart, strict=True):
        assert one.global_steps == 3
        assert equal(weights(one.module), weights(other.module))
    for engine in (*together, *apart):
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_several_losses_of_one_forward(comm, stage) -> None:
    """Before the boundary backwards add up; the graph of one forward may serve several."""
    summed, apart = make_engine(comm, settings(stage)), make_engine(comm, settings(stage))
    for step in range(3):
        first, second = (loss_of(summed, comm.rank, 2 * step + n) for n in range(2))
        assert torch.equal(summed.backward(first + second), first + second)
        summed.step()
        apart.set_gradient_accumulation_boundary(False)
        first = loss_of(apart, comm.rank, 2 * step)
        apart.backward(first * 0.25, retain_graph=True)
        again = first * 0.75
        apart.backward(again)
        apart.set_gradient_accumulation_boundary(True)
        apart.backward(loss_of(apart, comm.rank, 2 * step + 1))
        apart.step()
    assert apart.global_steps == apart.micro_steps == 3
    torch.testing.assert_close(apart.module.mix.weight, summed.module.mix.weight)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_every_step_may_be_the_boundary(comm, stage) -> None:
    """As many backwards as come before it add up, those of the engine and a loss's own."""
    one_bit = {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 2}}
    for keys in ({"gradient_clipping": 0.5}, {"optimizer": one_bit}):
        config = settings(stage, gradient_accumulation_steps=4, **keys)
        told, free = (
            make_engine(comm, config | {"managed_gradient_accumulation": managed}) for managed in (True, False)
        )
        first = samples = 0
        for steps, count in enumerate((2, 5, 1, 3), 1):
            told.set_gradient_accumulation_boundary(False)
            for engine in (told, free):
                for micro in range(count):
                    loss = loss_of(engine, comm.rank, first + micro) / count
                    engine.backward(loss, scale_wrt_gas=False)
                    assert not engine.is_gradient_accumulation_boundary()
                if engine is told:
                    told.set_gradient_accumulation_boundary(True)
                engine.step()
                assert engine.was_step_applied()
            first += count
            samples += count * MICRO * comm.size
            assert (free.global_steps, free.global_samples) == (steps, samples)
            assert equal(weights(free.module), weights(told.module))
    with pytest.raises(CallError, match=r"set_gradient_accumulation_boundary\(\).*every step\(\)"):
        free.set_gradient_accumulation_boundary(True)
    refused(CallError, r"step\(\) was called without backward", free.step)
    loss_of(free, comm.rank, 0).backward()
    free.step()
    assert free.global_steps == 5


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_two_losses_with_a_zero_grad_in_between(comm, stage) -> None:
    twice, once = make_engine(comm, settings(stage)), make_engine(comm, settings(stage))
    output = loss_of(twice, comm.rank, 0)
    twice.backward(output, retain_graph=True)
    twice.zero_grad()
    twice.backward(output)
    twice.step()
    once.backward(loss_of(once, comm.rank, 0))
    once.step()
    assert torch.equal(once.module.mix.weight, twice.module.mix.weight)


def test_calls_that_cannot_come() -> None:
    engine = make_engine(None, settings(gradient_accumulation_steps=2))
    loss_of(engine, 0, 0).backward()
    engine.step()
    refused(CallError, "began with a loss's own backward", engine.backward, loss_of(engine, 0, 1))
    engine.zero_grad()
    engine.backward(loss_of(engine, 0, 0))
    engine.step()
    refused(AssertionError, r"step\(\) was called without backward", engine.step)
    engine.backward(loss_of(engine, 0, 1))
    with pytest.raises(CallError, match=r"set_gradient_accumulation_boundary\(\) was called between"):
        engine.set_gradient_accumulation_boundary(False)
    with pytest.raises(CallError, match=r"no_sync\(\) was entered between"), engine.no_sync():
        pass
    engine.step()
    assert engine.global_steps == 1


def test_layer_drop_wants_to_know_of_the_backward() -> None:
    config = settings(progressive_layer_drop={"enabled": True, "theta": 0.5})
    engine, same = make_engine(None, config), make_engine(None, config)
    loss_of(engine, 0, 0).backward()
    refused(CallError, "with progressive_layer_drop", engine.step)
    engine.zero_grad()
    assert train_plainly(engine, range(1, 3), scaled=True) == train_plainly(same, range(1, 3), scaled=True)
