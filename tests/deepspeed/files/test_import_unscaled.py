"""Files of stage 0 by releases of DeepSpeed that divide gradients by a loss scale which no loss was multiplied by."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch

from tests.deepspeed.files.deepspeed_files import DYNAMIC_SCALE, FIXED_SCALE, MOMENTS, Trained, write_unsharded
from tests.deepspeed.files.test_import import check_bits, groups_of, imported, loss_of, make, make_trained, train
from tests.engine.checkpoint.jobs import missing
from thinwire import initialize
from thinwire.comm import Communicator, threads
from thinwire.engine.checkpoint.store import CheckpointStore
from thinwire.engine.errors import CheckpointError

SCALE = 1024.0


def divided(trained: Trained, scale: float) -> Trained:
    """The same job, had every gradient been divided by `scale`."""
    other = copy.deepcopy(trained)
    for state in other.optimizer.state.values():
        for power, kind in enumerate(MOMENTS, 1):
            state[kind] /= scale**power
    return other


def go_on(comm: Communicator, folder: Any) -> list[float]:
    """The losses of three more steps in fp16."""
    model, groups = make(9)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0}},
        "fp16": {"enabled": True, "initial_scale_power": 8},
    }
    engine, *_ = initialize(model=model, model_parameters=groups_of(model, groups), config=config, comm=comm)
    engine.load_checkpoint(folder)
    assert engine.loss_scaler is not None
    assert engine.loss_scaler.value == 256
    losses = []
    for step in range(4, 7):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("dynamic", [False, True])
def test_moments_are_those_of_the_gradients(tmp_path, flat: bool, dynamic: bool) -> None:
    """A scale that never changed is taken out again to the bit, being a power of 2."""
    trained = make_trained(31)
    scale = {**(DYNAMIC_SCALE if dynamic else FIXED_SCALE), "cur_scale": SCALE, "last_overflow_iter": -1}
    files = divided(trained, SCALE)
    write_unsharded(tmp_path / "in", files, torch.float16, flat, version="0.19.3 ", scale=scale)
    done = imported(tmp_path / "in")
    assert len(done.notes) == 1
    assert "DeepSpeed 0.19.3 divided the gradients by the loss scale, 1024" in done.notes[0]
    check_bits(tmp_path / "imported", trained, torch.float16)
    expected = train(trained.model, trained.optimizer, range(4, 7))
    losses = threads.run(partial(go_on, folder=tmp_path / "imported"), 2)[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-3, atol=0)


def adams_moments(scales: list[float], betas: tuple[float, float], gradient: float) -> list[float]:
    """Both moments after steps with one gradient, each divided by a scale of its own."""
    first = second = 0.0
    for scale in scales:
        first = betas[0] * first + (1 - betas[0]) * gradient / scale
        second = betas[1] * second + (1 - betas[1]) * (gradient / scale) ** 2
    return [first, second]


@pytest.mark.parametrize(("done", "overflow", "window"), [(4, -1, 3), (23, -1, 5), (24, 6, 5), (9, 7, 1), (7, 0, 2)])
def test_a_scale_that_doubled(tmp_path, done: int, overflow: int, window: int) -> None:
    """Of a gradient that was the same in every step, the moments come out as if no step had divided it."""
    trained = make_trained(33)
    betas, gradient = (0.9, 0.999), 0.37
    scales, value = [], 8.0
    for step in range(done):
        since = step - overflow - 1
        if step == overflow:
            value /= 2
            continue
        value *= 2 if step > overflow and since > 0 and since % window == 0 else 1
        scales.append(value)
    files, whole = (adams_moments(one, betas, gradient) for one in (scales, [1.0] * len(scales)))
    for state in trained.optimizer.state.values():
        for kind, one in zip(MOMENTS, files, strict=True):
            state[kind] = torch.full_like(state[kind], one)
    scale = {"cur_scale": value, "cur_iter": done, "last_overflow_iter": overflow, "scale_window": window}
    write_unsharded(
        tmp_path / "in", trained, torch.float16, True, version="0.18.3", scale={"dynamic_loss_scale": True, **scale}
    )
    imported(tmp_path / "in")
    with CheckpointStore(tmp_path / "imported", threads.single(10.0)).load() or missing() as found:
        for kind, expected in zip(MOMENTS, whole, strict=True):
            # Steps before an overflow are the only ones that a skipped one ages.
            got = found.read(kind, "words.weight", 0, 35)
            torch.testing.assert_close(got, torch.full((35,), expected), rtol=0.02 if overflow > 0 else 1e-5, atol=0)


@pytest.mark.parametrize(
    ("version", "dtype", "divided_by"),
    [
        ("0.18.2", torch.float16, 1.0),
        ("0.18.5+abc", torch.bfloat16, 65536.0),
        ("0.18.6", torch.bfloat16, 1.0),
        ("0.19.9", torch.float16, 1.0),
        ("unknown", torch.float16, 1.0),
    ],
)
def test_only_of_the_releases_that_did(tmp_path, version: str, dtype: torch.dtype, divided_by: float) -> None:
    trained = make_trained(32)
    scale = {**FIXED_SCALE, "cur_scale": 65536.0}
    write_unsharded(tmp_path / "in", divided(trained, divided_by), dtype, version=version, scale=scale)
    assert bool(imported(tmp_path / "in").notes) == (divided_by != 1)
    check_bits(tmp_path / "imported", trained, dtype)


@pytest.mark.parametrize("value", [2.0**40, 0.0, -3.0, float("nan"), float("inf")])
def test_a_scale_that_leaves_nothing_of_the_moments(tmp_path, value: float) -> None:
    scale = {**FIXED_SCALE, "cur_scale": value}
    write_unsharded(tmp_path / "in", make_trained(34), torch.float16, version="0.19.3", scale=scale)
    with pytest.raises(CheckpointError, match=r"0\.19\.3 divided the gradients.*--weights-only"):
        imported(tmp_path / "in")
    assert imported(tmp_path / "in", weights_only=True).optimizer is None
