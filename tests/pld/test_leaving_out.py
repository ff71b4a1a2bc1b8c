"""Buckets of dropped layers stay at home: fewer bytes, the same step, an error on every rank where that is unsafe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.pld.models import WIDTH, Residual, Stack, batch, make_stack
from tests.pld.test_optimizers import KINDS, STEPS, build, weights
from thinwire.comm import Communicator, threads
from thinwire.pld import LayerDrop, ProgressiveLayerDrop, drop_layers


def train(
    optimizer: Any, model: Stack, rank: int, *, leave_out: bool, accumulation: int = 1, zeroed: bool = False
) -> LayerDrop:
    schedule = ProgressiveLayerDrop(0.3, 1.0)
    drop = drop_layers(model, schedule, seed=12)
    for step in range(STEPS):
        schedule.update_state(step)
        optimizer.zero_grad(set_to_none=not zeroed)
        for micro in range(accumulation - 1):
            with optimizer.no_sync():
                (model(batch(rank, step, micro)).square().mean() / accumulation).backward()
        loss = model(batch(rank, step, accumulation)).square().mean() / accumulation
        if leave_out:
            optimizer.leave_out(drop.dropped_parameters())
        loss.backward()
        optimizer.step()
    return drop


@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 3) for kind in KINDS), ("OneBitAdam 0", 1)])
def test_the_step_is_the_same_with_fewer_bytes(kind: str, ranks: int) -> None:
    def body(comm: Communicator) -> tuple[list[Tensor], list[int]]:
        found, sent = [], []
        for leave_out in (False, True):
            model = make_stack()
            optimizer = build(kind, model, comm)
            train(optimizer, model, comm.rank, leave_out=leave_out)
            found.append(weights(model))
            sent.append(optimizer.bytes_sent)
        return found, sent

    results = threads.run(body, ranks)
    (waited, left_out), (all_bytes, fewer_bytes) = results[0]
    for (_, theirs), _ in results:
        assert torch.equal(theirs, left_out)
    if kind.startswith("AdamW"):
        assert torch.equal(waited, left_out)
    elif not kind.startswith("OneBitLion"):  # whose step is a sign, so that what is rounded differently moves by a step
        # What the codec rounds differently once frozen; the same rule otherwise.
        assert float((waited - left_out).norm() / (waited - weights(make_stack())).norm()) < 0.25
    if ranks > 1:
        assert fewer_bytes < 0.95 * all_bytes


@pytest.mark.parametrize("kind", ["AdamW 0", "AdamW 1", "AdamW 2"])
@pytest.mark.parametrize("zeroed", [False, True])
def test_accumulated_steps_are_the_same(kind: str, zeroed: bool) -> None:
    def body(comm: Communicator) -> list[Tensor]:
        found = []
        for leave_out in (False, True):
            model = make_stack()
            train(build(kind, model, comm), model, comm.rank, leave_out=leave_out, accumulation=2, zeroed=zeroed)
            found.append(weights(model))
        return found

    waited, left_out = threads.run(body, 2)[0]
    if zeroed and kind != "AdamW 2":  # without leave_out, a gradient of zeros is a gradient: moments decay
        assert not torch.equal(waited, left_out)
    else:
        assert torch.equal(waited, left_out)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_momentum_decays_without_an_exchange_as_with_one(codec: str) -> None:
    def body(comm: Communicator) -> list[Tensor]:
        found = []
        for leave_out in (False, True):
            model = make_stack()
            optimizer = thinwire.OneBitAdam(
                model.parameters(), lr=3e-3, freeze_step=6, comm=comm, codec=codec, bucket_bytes=2000, block_size=64
            )
            train(optimizer, model, comm.rank, leave_out=leave_out)
            found.append(weights(model))
        return found

    waited, left_out = threads.run(body, 2)[0]
    difference = float((waited - left_out).norm() / (waited - weights(make_stack())).norm())
    assert difference < (1e-5 if codec == "none" else 0.05)


@pytest.mark.parametrize("kind", ["OneBitAdam 0", "OneBitAdam 1"])
def test_a_bucket_that_stays_keeps_its_direction_and_its_residuals(kind: str) -> None:
    def body(comm: Communicator) -> tuple[int, list[Tensor]]:
        model = make_stack()
        optimizer: Any = build(kind, model, comm)
        for step in range(10):
            model(batch(comm.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.frozen
        sent, moves, before = optimizer.bytes_sent, [], weights(model.layers[1])
        for step in range(3):
            loss = model.head(model.embed(batch(comm.rank, step))).square().mean()
            optimizer.leave_out(model.layers.parameters())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            moves.append(weights(model.layers[1]) - before)
            before = weights(model.layers[1])
        return optimizer.bytes_sent - sent, moves

    for _, moves in threads.run(body, 2):
        assert float(moves[0].abs().max()) > 0
        corrected = (1 - 0.9**11) / (1 - 0.9**12)
        torch.testing.assert_close(moves[1], moves[0] * 0.9 * corrected, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_differ_all_hear_of_it(kind: str) -> None:
    def body(comm: Communicator) -> None:
        model = make_stack()
        optimizer: Any = build(kind, model, comm)
        with pytest.raises(ValueError, match="rank 1 and rank 0 disagree on leaving out parameter"):
            optimizer.leave_out(model.layers[comm.rank].parameters())

    threads.run(body, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_what_was_left_out_is_an_error(kind: str) -> None:
    def body(comm: Communicator) -> None:
        model = make_stack()
        optimizer: Any = build(kind, model, comm)
        loss = model(batch(comm.rank)).square().mean()
        optimizer.leave_out(model.layers[0].parameters())
        with pytest.raises(RuntimeError, match="was left out"):
            loss.backward()

    threads.run(body, 1)


@pytest.mark.parametrize("kind", ["OneBitAdam 0", "AdamW 1"])
def test_an_earlier_gradient_is_an_error_on_every_rank(kind: str) -> None:
    def body(comm: Communicator) -> str:
        model = make_stack()
        optimizer: Any = build(kind, model, comm)
        if comm.rank == 1:
            with optimizer.no_sync():
                model(batch(0)).square().mean().backward()
        with pytest.raises(ValueError, match="leave") as caught:
            optimizer.leave_out(model.layers.parameters())
        return str(caught.value)

    first, second = threads.run(body, 2)
    assert "rank 1 could not leave parameters out" in first
    assert "has a gradient from an earlier backward()" in second


@pytest.mark.parametrize("kind", ["OneBitAdam 0", "AdamW 0", "OneBitAdam 1"])
def test_too_late_is_an_error(kind: str) -> None:
    def body(comm: Communicator) -> None:
        model = make_stack()
        optimizer: Any = build(kind, model, comm)
        model.head(model.embed(batch(0))).square().mean().backward()
        optimizer.leave_out(model.layers.parameters())

    with pytest.raises(RuntimeError, match="comes before"):
        threads.run(body, 1)


def test_parameters_of_others_are_left_to_them() -> None:
    def body(comm: Communicator) -> None:
        model = make_stack()
        optimizer: Any = build("AdamW 1", model, comm)
        optimizer.leave_out([nn.Parameter(torch.zeros(3)), *model.layers[0].parameters()])

    threads.run(body, 2)


def test_what_a_kept_layer_or_the_rest_of_the_model_uses_is_not_dropped() -> None:
    model = make_stack(layers=3)
    shared = model.layers[0].norm
    for layer in model.layers:
        layer.norm = shared
    model.layers[2].up = model.layers[1].up
    tied = Residual(WIDTH)
    model.layers[1].down = tied.down
    model.add_module("other", nn.Sequential(tied.down))
    schedule = ProgressiveLayerDrop(0.0, 5.0)
    drop = drop_layers(model, schedule, seed=3)
    seen = set()
    for step in range(1, 60):
        schedule.update_state(step)
        model(batch(step))
        dropped = {id(one) for one in drop.dropped_parameters()}
        assert id(tied.down.weight) not in dropped
        first, last = (id(model.layers[index].down.weight) in dropped for index in (0, 2))
        of_both = id(model.layers[2].up.weight) in dropped  # of the second and the third
        of_all = id(shared.weight) in dropped
        assert of_both <= last
        assert of_all == (first and of_both)
        seen.add((last, of_both, of_all))
    assert {(True, False, False), (True, True, False), (True, True, True)} <= seen
