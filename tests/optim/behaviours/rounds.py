"""One step after the other: what leaves when, which steps are skipped, and what a step costs."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.optim.subject import FREEZE, LOCAL, Subject, alike, behaviour, dyadic, next_send, with_gradients
from tests.optim.training import calls_made, exchange_comm, loss_of, make_model, same, snapshot, train, weights
from tests.pairwise import each_once
from thinwire.comm import Communicator
from thinwire.optim.step import Send


@behaviour(3, everywhere=True)
def ranks_hold_the_same_bits_after_every_step_but_local_ones(comm: Communicator, subject: Subject) -> None:
    model = make_model(seed=comm.rank)  # rank 0's weights are given to all
    optimizer = subject.build(model, comm, weight_decay=0.01)
    assert alike(comm, model)
    losses = []
    for step in range(30):
        local = next_send(optimizer) is Send.LOCAL
        losses += train(model, optimizer, [step])
        assert optimizer.last_step.applied
        assert optimizer.last_step.reason == ""
        assert optimizer.steps == step + 1
        assert optimizer.in_sync == (not local)
        assert alike(comm, model) == (not local)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert optimizer.frozen
    frozen_at = 0 if subject.entry.freeze_option is None else FREEZE
    assert optimizer.frozen_at == frozen_at
    assert local == subject.entry.local_steps


@behaviour(2, of_home=True)
def buckets_leave_during_backward(comm: Communicator, subject: Subject) -> None:
    model, optimizer = subject.on_model(comm, bucket_bytes=256)
    for step in range(FREEZE + 3):
        calls, seen = calls_made(optimizer), []
        # When the first layer's gradient is computed, the later layers' buckets have left.
        handle = model[0].weight.register_hook(lambda _, seen=seen: seen.append(calls_made(optimizer)))
        optimizer.zero_grad()
        loss_of(model, comm.rank, step).backward()
        handle.remove()
        optimizer.step()
        if step or subject.stage:  # at stage 0 the first backward shows the order in which gradients arrive
            assert seen[0] >= calls + 2


@behaviour(3, of_home=True)
def a_closure_is_called_once_and_its_loss_returned(comm: Communicator, subject: Subject) -> None:
    model, optimizer = subject.on_model(comm)
    calls = []

    def closure() -> float:
        calls.append(1)
        optimizer.zero_grad()
        loss = loss_of(model, comm.rank, 0)
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == loss_of(make_model(), comm.rank, 0).item()
    assert calls == [1]
    assert alike(comm, model)


@behaviour(2, of_home=True)
def accumulated_gradients_are_those_of_one_backward(comm: Communicator, subject: Subject) -> None:
    """To the bit, as the sums are exact, and for the same bytes."""
    found = []
    for accumulates in (True, False):
        model, optimizer = subject.on_model(comm)
        for step in range(LOCAL + 3):
            optimizer.zero_grad()
            parts = [dyadic(model, comm.rank, 3 * step + part) for part in range(3)]
            if accumulates:
                for gradients in parts[:2]:
                    with optimizer.no_sync():
                        with_gradients(model, gradients).backward()
                with_gradients(model, parts[2]).backward()
            else:
                with_gradients(model, [sum(one) for one in zip(*parts, strict=True)]).backward()
            optimizer.step()
        found.append((weights(model), optimizer.bytes_sent))
    if subject.stage < 2:
        assert torch.equal(found[0][0], found[1][0])
        assert found[0][1] == found[1][1]
    else:  # every backward of the warmup is sent, and averages are added
        torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-2)


@behaviour(2, of_home=True)
def a_second_backward_is_an_error_that_names_a_parameter(comm: Communicator, subject: Subject) -> None:
    moments = (0, *subject.moments) if subject.stage < 2 else (FREEZE + 3,)  # stage 2 sends every one of the warmup
    for moment in moments:
        model, optimizer = subject.on_model(comm, moment)
        optimizer.zero_grad()
        loss_of(model, comm.rank, 0).backward()
        with pytest.raises(
            RuntimeError, match=r"second backward\(\) before step\(\) reached parameter .*'4.bias'.*no_sync"
        ):
            loss_of(model, comm.rank, 1).backward()
        with pytest.raises(RuntimeError, match="no_sync"), optimizer.no_sync():
            pass
        optimizer.zero_grad()
        train(model, optimizer, range(3))
        optimizer.synchronize_weights()
        assert alike(comm, model)


@behaviour(2, of_home=True)
def zero_grad_before_step_drops_the_step(comm: Communicator, subject: Subject) -> None:
    model, optimizer = subject.on_model(comm)
    for moment in (*subject.moments, LOCAL):
        train(model, optimizer, range(optimizer.steps, moment))
        optimizer.zero_grad()
        before = snapshot(model, optimizer)
        loss_of(model, comm.rank, 99).backward()
        optimizer.zero_grad()
        assert same(before, snapshot(model, optimizer))
        train(model, optimizer, [moment])
        assert optimizer.steps == moment + 1
        optimizer.synchronize_weights()
        assert alike(comm, model)


@behaviour(1, 2, of_home=True)
def a_step_without_any_gradient_changes_nothing(comm: Communicator, subject: Subject) -> None:
    for moment in subject.moments:
        model, optimizer = subject.on_model(comm, moment)
        optimizer.zero_grad()
        before = snapshot(model, optimizer)
        optimizer.step()
        assert not optimizer.last_step.applied
        assert optimizer.last_step.reason == "no parameter had a gradient"
        assert optimizer.skipped_steps == 0
        assert same(before, snapshot(model, optimizer))


@behaviour(3, warns="was skipped on every rank: a gradient was NaN or infinite", everywhere=True)
def one_rank_overflows_and_all_skip_the_step(comm: Communicator, subject: Subject) -> None:
    model = make_model()
    overflow_and_go_on(comm, subject, model, subject.build(model, comm), 1.0)


@behaviour(3, of_home=True)
def one_rank_overflows_in_16_bits_and_with_a_loss_scale_nobody_is_warned(comm: Communicator, subject: Subject) -> None:
    model = make_model()
    overflow_and_go_on(comm, subject, model, subject.build(model, comm, param_dtype=torch.float16), 64.0)


def overflow_and_go_on(comm: Communicator, subject: Subject, model: nn.Module, optimizer: Any, scale: float) -> None:
    """At each moment skip a step for an infinity or a NaN of rank 1, and take one."""
    optimizer.loss_scale = scale
    for number, moment in enumerate((*subject.moments, FREEZE + 5)):
        bad = (math.inf, math.nan)[number % 2]
        train_scaled(comm, model, optimizer, range(optimizer.steps, moment))
        before = snapshot(model, optimizer)
        optimizer.zero_grad()
        (loss_of(model, comm.rank, 500) * (bad if comm.rank == 1 else scale)).backward()
        optimizer.step()
        assert not optimizer.last_step.applied
        assert optimizer.last_step.reason.startswith("a gradient was NaN or infinite")
        assert subject.stage > 0 or optimizer.last_step.reason.endswith("on ranks [1]")
        assert not math.isfinite(optimizer.last_step.grad_norm)
        assert optimizer.skipped_steps == number + 1
        assert same(before, snapshot(model, optimizer))
        train_scaled(comm, model, optimizer, range(moment, moment + 1))
        assert optimizer.last_step.applied
    optimizer.synchronize_weights()
    assert bool(weights(model).isfinite().all())
    assert alike(comm, model)


def train_scaled(comm: Communicator, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        (optimizer.loss_scale * loss_of(model, comm.rank, step)).backward()
        optimizer.step()


@behaviour(4)
def a_compressed_step_sends_a_codecs_bits_of_fp32s_in_two_calls(comm: Communicator, subject: Subject) -> None:
    numel = 4 * 40 * 2048 - 5  # 40 blocks a rank, and padding
    weight = nn.Parameter(torch.ones(numel))
    optimizer = subject.build_on([weight], comm, block_size=2048, bucket_bytes=1 << 22)
    traffic = exchange_comm(optimizer).traffic
    for step in range(FREEZE + 2):
        sent, uncompressed, calls = optimizer.bytes_sent, optimizer.bytes_uncompressed, traffic.calls
        weight.grad = None
        (weight * (comm.rank + step - 3.5)).sum().backward()
        optimizer.step()
    ring = 2 * 3 / 4 * numel
    assert optimizer.bytes_sent - sent <= 1.01 * ring * subject.bits / 8
    assert optimizer.bytes_uncompressed - uncompressed == round(ring * 4)
    # Beside the two legs, norms of layers where there are any.
    assert traffic.calls - calls == 2 if subject.entry.elementwise else traffic.calls - calls <= 4


@behaviour(2, of_home=True)
def what_changes_on_one_rank_is_an_error_that_names_it(comm: Communicator, subject: Subject) -> None:
    # Every value at a moment, and the other way round: in another stage they meet otherwise.
    values = [("lr", 0.5), ("weight_decay", 0.3), ("requires_grad", False)]
    values = values[subject.stage :] + values[: subject.stage]
    for (name, value), moment in each_once(values, (0, *subject.moments)):
        model, optimizer = subject.on_model(comm, moment)
        if comm.rank and name != "requires_grad":  # which is looked at before the next gradients leave
            optimizer.param_groups[0][name] = value
        while next_send(optimizer) is Send.LOCAL:
            train(model, optimizer, [optimizer.steps])
        if comm.rank and name == "requires_grad":
            model[0].weight.requires_grad_(value)
        says = name if name == "requires_grad" else f"rank 1 and rank 0 differ: .*'{name}': {value}"
        with pytest.raises(ValueError, match=says):
            train(model, optimizer, [optimizer.steps])
