"""What holds of every optimizer, wherever its state lives: each behaviour is one body, which runs on every rank."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optim.subject import FREEZE, LOCAL, Subject, dyadic, next_send, with_gradients
from tests.optim.training import exchange_comm, loss_of, make_model, same, snapshot, through_a_file, train, weights
from thinwire.comm import Communicator
from thinwire.optim.algorithm import Send

Body = Callable[[Communicator, Subject], Any]

SIZES: dict[Body, tuple[int, ...]] = {}
"""Every behaviour, with the numbers of ranks that it is tried on."""

WARNS: dict[Body, str] = {}
"""What a behaviour must warn of, once for each call of it on all ranks; nothing else may warn."""


def behaviour(*sizes: int, warns: str | None = None) -> Callable[[Body], Body]:
    """Try a body on these numbers of ranks."""

    def note(body: Body) -> Body:
        SIZES[body] = sizes
        if warns is not None:
            WARNS[body] = warns
        return body

    return note


def alike(comm: Communicator, model: nn.Module) -> bool:
    """Whether every rank has the same bits of the weights. Collective."""
    return len(set(comm.all_gather_bytes(weights(model).numpy().tobytes()))) == 1


# One step after the other


@behaviour(1, 3)
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
        assert alike(comm, model) == (not local or comm.size == 1)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert optimizer.frozen
    frozen_at = 0 if subject.entry.freeze_option is None else FREEZE
    assert optimizer.frozen_at == frozen_at
    assert local == subject.entry.local_steps


@behaviour(2)
def buckets_leave_during_backward(comm: Communicator, subject: Subject) -> None:
    model = make_model()
    optimizer = subject.build(model, comm, bucket_bytes=256)
    traffic = exchange_comm(optimizer).traffic
    for step in range(FREEZE + 3):
        calls, seen = traffic.calls, []
        # When the first layer's gradient is computed, the later layers' buckets have left.
        handle = model[0].weight.register_hook(lambda _, seen=seen: seen.append(traffic.calls))
        optimizer.zero_grad()
        loss_of(model, comm.rank, step).backward()
        handle.remove()
        optimizer.step()
        if step or subject.stage:  # at stage 0 the first backward shows the order in which gradients arrive
            assert seen[0] >= calls + 2


@behaviour(3)
def a_closure_is_called_once_and_its_loss_returned(comm: Communicator, subject: Subject) -> None:
    model = make_model()
    optimizer = subject.build(model, comm)
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


@behaviour(2)
def accumulated_gradients_are_those_of_one_backward(comm: Communicator, subject: Subject) -> None:
    """To the bit, as the sums are exact, and for the same bytes."""
    found = []
    for accumulates in (True, False):
        model = make_model()
        optimizer = subject.build(model, comm)
        for step in range(FREEZE + 6):
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


@behaviour(2)
def a_second_backward_is_an_error_that_names_a_parameter(comm: Communicator, subject: Subject) -> None:
    model = make_model()
    optimizer = subject.build(model, comm)
    train(model, optimizer, range(FREEZE + 2 if subject.stage == 2 else 3))
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
    assert alike(comm, model)


@behaviour(2)
def zero_grad_before_step_drops_the_step(comm: Communicator, subject: Subject) -> None:
    for moment in subject.moments:
        model = make_model()
        optimizer = subject.build(model, comm)
        train(model, optimizer, range(moment))
        before = snapshot(model, optimizer)
        loss_of(model, comm.rank, 99).backward()
        optimizer.zero_grad()
        assert same(before, snapshot(model, optimizer))
        train(model, optimizer, [moment])
        assert optimizer.steps == moment + 1
        assert alike(comm, model)


@behaviour(1, 2)
def a_step_without_any_gradient_changes_nothing(comm: Communicator, subject: Subject) -> None:
    for moment in subject.moments:
        model = make_model()
        optimizer = subject.build(model, comm)
        train(model, optimizer, range(moment))
        optimizer.zero_grad()
        before = snapshot(model, optimizer)
        optimizer.step()
        assert not optimizer.last_step.applied
        assert optimizer.last_step.reason == "no parameter had a gradient"
        assert optimizer.skipped_steps == 0
        assert same(before, snapshot(model, optimizer))


@behaviour(3, warns="was skipped on every rank: a gradient was NaN or infinite")
def one_rank_overflows_and_all_skip_the_step(comm: Communicator, subject: Subject) -> None:
    for bad, moment in zip((math.nan, math.inf, math.nan), subject.moments, strict=False):
        model = make_model()
        optimizer = subject.build(model, comm)
        train(model, optimizer, range(moment))
        before = snapshot(model, optimizer)
        optimizer.zero_grad()
        (loss_of(model, comm.rank, 500) * (bad if comm.rank == 1 else 1.0)).backward()
        optimizer.step()
        assert not optimizer.last_step.applied
        assert optimizer.last_step.reason.startswith("a gradient was NaN or infinite")
        assert not math.isfinite(optimizer.last_step.grad_norm)
        assert optimizer.skipped_steps == 1
        assert same(before, snapshot(model, optimizer))
        train(model, optimizer, range(moment, moment + 2))
        assert optimizer.last_step.applied
        optimizer.synchronize_weights()
        assert bool(weights(model).isfinite().all())
        assert alike(comm, model)


# What the loss is multiplied by, and clipped to


@behaviour(2)
def clipping_is_by_the_averaged_gradients_norm(comm: Communicator, subject: Subject) -> None:
    model = make_model()
    optimizer = subject.build(model, comm, max_norm=0.05)
    for step in range(LOCAL + 2):
        own = torch.autograd.grad(loss_of(model, comm.rank, step), list(model.parameters()))
        gradient = torch.cat([one.reshape(-1) for one in own])
        comm.all_reduce(gradient, "mean")
        exact, send = float(gradient.norm()), next_send(optimizer)
        train(model, optimizer, [step])
        if send is Send.LOCAL:  # nobody hears of the others' gradients
            assert math.isnan(optimizer.last_step.grad_norm)
        else:  # the sketch's standard deviation is 0.55%
            tolerance = 1e-5 if send is Send.EXACT else 0.03
            assert optimizer.last_step.grad_norm == pytest.approx(exact, rel=tolerance)


@behaviour(2)
def an_exact_step_is_clipped_as_torch_does(comm: Communicator, subject: Subject) -> None:
    """Beside it trains one that does not clip, on averaged gradients that torch has clipped."""
    model, twin = make_model(), make_model()
    optimizer = subject.build(model, comm, max_norm=0.05)
    plain = subject.build(twin, comm)
    while optimizer.steps < FREEZE and next_send(optimizer) is Send.EXACT:
        step = optimizer.steps
        other = make_model()
        other.load_state_dict(twin.state_dict())
        for rank in range(comm.size):
            (loss_of(other, rank, step) / comm.size).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.05)
        with_gradients(twin, [parameter.grad for parameter in other.parameters()]).backward()
        plain.step()
        plain.zero_grad()
        train(model, optimizer, [step])
        torch.testing.assert_close(weights(model), weights(twin), rtol=1e-5, atol=1e-6)


@behaviour(2)
def a_clipped_spike_does_no_more_than_a_step(comm: Communicator, subject: Subject) -> None:
    for moment in (*subject.moments, LOCAL):
        model = make_model()
        optimizer = subject.build(model, comm, max_norm=0.05)
        train(model, optimizer, range(moment))
        before = weights(model)
        train(model, optimizer, range(moment, moment + 4))
        usual = float((weights(model) - before).abs().max())
        optimizer.zero_grad()
        (1e6 * loss_of(model, comm.rank, 999)).backward()
        optimizer.step()
        before = weights(model)
        train(model, optimizer, range(moment + 5, moment + 9))
        assert float((weights(model) - before).abs().max()) < 4 * usual


def scaled_run(comm: Communicator, subject: Subject, scaler: torch.amp.GradScaler, overflows: tuple[int, ...]) -> tuple:
    """Weights, scales and the optimizer after 20 steps, in some of which rank 1's loss is infinite."""
    model = make_model()
    optimizer = subject.build(model, comm)
    scales = []
    for step in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, comm.rank, step)
        scaler.scale(loss * (math.inf if step in overflows and comm.rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    optimizer.synchronize_weights()
    assert alike(comm, model)
    return weights(model), scales, optimizer


@behaviour(2)
def a_grad_scalers_scale_is_divided_out(comm: Communicator, subject: Subject) -> None:
    # Powers of two leave every bit of a gradient but its exponent.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=7)
    if subject.stage == 2:
        with pytest.raises(RuntimeError, match="GradScaler cannot look at gradients that stage 2 has sent"):
            scaled_run(comm, subject, scaler, ())
        return
    found, scales, _ = scaled_run(comm, subject, scaler, ())
    assert scales[-1] == 2.0**8
    assert torch.equal(found, scaled_run(comm, subject, torch.amp.GradScaler("cpu", enabled=False), ())[0])


@behaviour(3)
def one_ranks_overflow_reaches_every_ranks_scaler(comm: Communicator, subject: Subject) -> None:
    if subject.stage == 2:
        return  # see above
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    # Once there are local steps every rank is alone with its overflows.
    overflows = (0, 5) if subject.entry.local_steps else (0, 5, FREEZE + 3)
    found, scales, optimizer = scaled_run(comm, subject, scaler, overflows)
    assert scales[0] == 2.0**9
    assert scales[-1] == 2.0 ** (10 - len(overflows))
    assert optimizer.skipped_steps == len(overflows)
    assert len(set(comm.all_gather_bytes(repr(scales).encode()))) == 1
    assert bool(found.isfinite().all())


@behaviour(2)
def a_loss_scale_of_ones_own_is_divided_out(comm: Communicator, subject: Subject) -> None:
    found = []
    for scale in (1.0, 64.0):
        model = make_model()
        optimizer = subject.build(model, comm)
        for step in range(16):
            optimizer.zero_grad()
            optimizer.loss_scale = scale * 2.0 ** (step // 6) if scale > 1 else 1.0
            (optimizer.loss_scale * loss_of(model, comm.rank, step)).backward()
            optimizer.step()
        optimizer.synchronize_weights()
        found.append(weights(model))
    assert torch.equal(*found)


@behaviour(2)
def gradients_changed_after_backward_are_an_error_or_have_no_effect(comm: Communicator, subject: Subject) -> None:
    model = make_model()
    optimizer = subject.build(model, comm)
    for moment in subject.moments:
        train(model, optimizer, range(optimizer.steps, moment))
        optimizer.zero_grad()
        loss_of(model, comm.rank, 0).backward()
        with torch.no_grad():
            model[2].weight.grad = torch.ones_like(model[2].weight)
        if subject.stage:  # gradients are averaged where they lie: an edit cannot be told from that, and has no effect
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match=r"'2.weight'.* was changed or dropped between backward"):
                optimizer.step()
        optimizer.zero_grad()
    train(model, optimizer, range(2))
    optimizer.synchronize_weights()
    assert alike(comm, model)


# Parameters and groups


def awkward_model() -> nn.ParameterList:
    """An empty parameter, a scalar, and sizes around a block's."""
    shapes = [(), (0, 3), (1,), (63,), (8, 8), (5, 13), (0,), (300,)]
    generator = torch.Generator().manual_seed(1)
    return nn.ParameterList([nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes])


@behaviour(1, 2, 3)
def empty_scalar_and_odd_sizes_train(comm: Communicator, subject: Subject) -> None:
    model = awkward_model()
    optimizer = subject.build(model, comm)
    before = weights(model).norm()
    for _ in range(FREEZE + 10):
        optimizer.zero_grad()
        sum((one - 0.1 * comm.rank).square().sum() for one in model).backward()
        optimizer.step()
    optimizer.synchronize_weights()
    assert alike(comm, model)
    assert weights(model).norm() < before


@behaviour(2)
def only_empty_parameters_are_no_trouble(comm: Communicator, subject: Subject) -> None:
    empty = nn.Parameter(torch.empty(0, 3))
    optimizer = subject.build_on([empty], comm)
    for _ in range(FREEZE + 2):
        empty.grad = None
        empty.sum().backward()
        optimizer.step()
    assert optimizer.last_step.applied


@behaviour(2)
def groups_and_schedulers_are_obeyed(comm: Communicator, subject: Subject) -> None:
    model = make_model()
    named = list(model.named_parameters())
    groups = [
        {"params": [one for one in named if one[1].dim() > 1], "lr": 0.0, "weight_decay": 0.1},
        {"params": [one for one in named if one[1].dim() == 1]},
    ]
    optimizer = subject.build_on(groups, comm)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < FREEZE + 4 else 0.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, range(FREEZE + 4), lambda step: schedule.step())
    optimizer.synchronize_weights()
    middle = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, range(FREEZE + 4, FREEZE + 8))
    after = list(model.parameters())
    moved = [not torch.equal(one, other) for one, other in zip(before, middle, strict=True)]
    assert moved == [parameter.dim() == 1 for parameter in after]
    assert all(torch.equal(one, other) for one, other in zip(middle, after, strict=True))


@behaviour(2)
def a_parameter_without_gradient_is_left_alone_or_counts_as_zero(comm: Communicator, subject: Subject) -> None:
    for moment in subject.moments:
        model = make_model()
        optimizer = subject.build(model, comm)
        train(model, optimizer, range(moment))
        before = weights(model[4])
        optimizer.zero_grad()
        left_alone = next_send(optimizer) is Send.EXACT
        model[0](torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank))).square().sum().backward()
        optimizer.step()
        assert optimizer.last_step.applied
        assert torch.equal(before, weights(model[4])) == left_alone  # else its momentum goes on
        train(model, optimizer, range(moment + 1, moment + 3))
        assert alike(comm, model)


@behaviour(2)
def a_parameter_that_no_step_reaches_stays(comm: Communicator, subject: Subject) -> None:
    model = make_model()
    model.unused = nn.Parameter(torch.ones(70))
    optimizer = subject.build(model, comm)
    train_beside_unused(model, optimizer, range(20))
    optimizer.synchronize_weights()
    assert torch.equal(model.unused, torch.ones(70))
    assert alike(comm, model)


def train_beside_unused(model: nn.Sequential, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(100 * optimizer.comm.rank + step))
        hidden = inputs
        for layer in model:
            hidden = layer(hidden)
        (hidden - 1).square().mean().backward()
        optimizer.step()


@behaviour(3)
def a_gradient_on_some_ranks_only_is_an_error_or_counts_as_zero_on_the_others(
    comm: Communicator, subject: Subject
) -> None:
    """Where every rank holds all state, all have to take the same parameters along; owners of shards do not care."""
    for moment in subject.moments:
        model = make_model()
        optimizer = subject.build(model, comm)
        train(model, optimizer, range(moment))
        optimizer.zero_grad()
        before = weights(model)
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank))

        def backward_and_step(  # the one raises where gradients are complete, the other where they are not
            model: nn.Sequential = model, optimizer: Any = optimizer, inputs: Tensor = inputs
        ) -> None:
            (model[0](inputs) if comm.rank == 1 else model(inputs)).square().sum().backward()
            optimizer.step()

        if subject.stage == 0:
            message = r"parameter 2 of group 0 '2.weight'.* on ranks \[0, 2\] but none on ranks \[1\]"
            with pytest.raises(ValueError, match=message):
                backward_and_step()
            assert torch.equal(before, weights(model))
        else:
            backward_and_step()
            assert optimizer.last_step.applied
            assert alike(comm, model)


@behaviour(2)
def leaving_out_saves_bytes_or_is_refused(comm: Communicator, subject: Subject) -> None:
    model = make_model()
    optimizer = subject.build(model, comm, bucket_bytes=256)
    if subject.entry.local_steps:
        with pytest.raises(RuntimeError, match="an optimizer with local steps leaves no parameters out"):
            optimizer.leave_out(model[4].parameters())
        return
    for moment in subject.moments:
        train(model, optimizer, range(optimizer.steps, moment))
        sent = optimizer.bytes_sent
        train(model, optimizer, [moment])
        usually = optimizer.bytes_sent - sent
        optimizer.zero_grad()
        optimizer.leave_out([*model[2].parameters(), *model[4].parameters()])
        model[0](torch.ones(4, 6)).square().sum().backward()
        optimizer.step()
        assert optimizer.last_step.applied
        assert optimizer.bytes_sent - sent - usually < usually
        assert alike(comm, model)


@behaviour(2)
def a_parameter_that_stops_training_stays(comm: Communicator, subject: Subject) -> None:
    for moment in subject.moments:
        model = make_model()
        optimizer = subject.build(model, comm, weight_decay=0.1)
        train(model, optimizer, range(moment))
        model[2].requires_grad_(False)
        before = weights(model[2])
        train(model, optimizer, range(moment, moment + 3))
        assert torch.equal(before, weights(model[2])), moment
        optimizer.synchronize_weights()
        assert alike(comm, model)


@behaviour(2)
def a_parameter_that_begins_to_train_later_warms_up_on_its_own_or_is_refused(
    comm: Communicator, subject: Subject
) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    before = weights(model[0])
    optimizer = subject.build(model, comm)
    train(model, optimizer, range(FREEZE + 2))
    assert torch.equal(weights(model[0]), before)
    model[0].requires_grad_(True)
    if subject.stage:
        with pytest.raises(RuntimeError, match="2 parameters require gradients now but did not"):
            train(model, optimizer, [FREEZE + 2])
        return
    train(model, optimizer, range(FREEZE + 2, FREEZE + 6))
    assert not torch.equal(weights(model[0]), before)
    assert optimizer.frozen == (subject.entry.freeze_option is None)
    train(model, optimizer, range(FREEZE + 6, 2 * FREEZE + 4))
    assert optimizer.frozen
    optimizer.synchronize_weights()
    assert alike(comm, model)


@behaviour(2)
def a_group_added_later_warms_up_on_its_own_or_is_refused(comm: Communicator, subject: Subject) -> None:
    model = make_model()
    optimizer = subject.build_on(model[0].named_parameters(), comm)
    train(model, optimizer, range(FREEZE + 2))
    model.zero_grad()
    group = {"params": model[2].named_parameters(prefix="2"), "lr": 1e-3}
    if subject.stage:
        with pytest.raises(RuntimeError, match="parameters cannot be added to a sharded optimizer: build a new one"):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
        return
    optimizer.add_param_group(group)
    assert optimizer.frozen
    train(model, optimizer, range(FREEZE + 2, FREEZE + 6))
    assert optimizer.frozen == (subject.entry.freeze_option is None)
    train(model, optimizer, range(FREEZE + 6, 2 * FREEZE + 4))
    optimizer.synchronize_weights()
    assert optimizer.frozen
    assert alike(comm, model)


@behaviour(2)
def weights_in_16_bits_agree_and_follow_fp32_master_weights(comm: Communicator, subject: Subject) -> None:
    for dtype, of_model in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)):
        model = make_model(dtype=dtype if of_model else torch.float32)
        exact = weights(model)
        optimizer = subject.build(model, comm, resync_interval=4, **({} if of_model else {"param_dtype": dtype}))
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        first = {one.name: one.tensor for one in optimizer.saved_slices() if one.kind == "master"}
        assert all(tensor.dtype == torch.float32 for tensor in first.values())
        if comm.size == 1:
            assert torch.equal(torch.cat([first[name] for name, _ in model.named_parameters()]), exact)
        losses = train(model, optimizer, range(28))
        optimizer.synchronize_weights()
        assert alike(comm, model)
        assert sum(losses[-5:]) < sum(losses[:5])
        shown = dict(model.named_parameters())
        for one in optimizer.saved_slices():
            if one.kind == "master":
                run = shown[one.name].detach().float().reshape(-1)[one.start : one.start + one.tensor.numel()]
                # Rounded at random up to four times since copies were taken from the master weights.
                torch.testing.assert_close(run, one.tensor, rtol=8 * torch.finfo(dtype).eps, atol=1e-4)


@behaviour(2)
def an_exp_avg_mask_holds_coordinates_or_is_refused(comm: Communicator, subject: Subject) -> None:
    weight = nn.Parameter(torch.ones(4, 32))
    mask = torch.ones(1, 32)
    mask[0, 20:] = 0
    groups = [{"params": [weight], "exp_avg_mask": mask}]
    if subject.entry.freeze_option is None:
        with pytest.raises(ValueError, match="exp_avg_mask"):
            subject.build_on(groups, comm)
        return
    optimizer = subject.build_on(groups, comm)
    for step in range(FREEZE + 6):
        weight.grad = None
        (weight * (comm.rank + 1 + step)).sum().backward()
        optimizer.step()
        if step == FREEZE - 1:
            at_freeze = weight.detach().clone()
    assert (weight != at_freeze).all(dim=0).tolist() == [True] * 20 + [False] * 12


@behaviour(2)
def an_optimizer_built_later_is_the_one_that_sends(comm: Communicator, subject: Subject) -> None:
    if subject.stage:
        return  # its parameters lie in the first one's buckets
    model = make_model()
    first = subject.build(model, comm)
    train(model, first, range(FREEZE + 2))
    sent = first.bytes_sent
    train(model, subject.build(model, comm), range(FREEZE + 2))
    assert first.bytes_sent == sent


# State


@behaviour(2)
def a_resume_goes_on_bit_for_bit(comm: Communicator, subject: Subject) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for moment in (*subject.moments, FREEZE, LOCAL + 1):
            model = make_model(dtype=dtype)
            optimizer = subject.build(model, comm, weight_decay=0.1)
            train(model, optimizer, range(moment))
            optimizer.param_groups[0]["lr"] *= 0.5
            saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            expected = train(model, optimizer, range(moment, moment + 6))

            resumed = make_model(seed=5, dtype=dtype)
            again = subject.build(resumed, comm, weight_decay=0.2)
            train(resumed, again, range(FREEZE + 1))  # what was there before has to go
            resumed.load_state_dict(saved["model"])
            again.load_state_dict(saved["optimizer"])
            assert train(resumed, again, range(moment, moment + 6)) == expected
            assert same(snapshot(resumed, again), snapshot(model, optimizer))
            assert again.bytes_sent == optimizer.bytes_sent
            assert again.bytes_uncompressed == optimizer.bytes_uncompressed
            assert again.frozen_at == optimizer.frozen_at
            assert again.skipped_steps == optimizer.skipped_steps
            assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@behaviour(2)
def weights_written_by_somebody_are_taken_over(comm: Communicator, subject: Subject) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for moment in (0, *subject.moments):
            model, other = make_model(dtype=dtype), make_model(seed=9, dtype=dtype)
            optimizer = subject.build(model, comm)
            train(model, optimizer, range(moment))
            optimizer.param_groups[0]["lr"] *= 1e-3
            model.load_state_dict(other.state_dict())
            train(model, optimizer, range(moment, moment + 2))
            assert float((weights(model) - weights(other)).abs().max()) < 0.02


@behaviour(2)
def reset_state_begins_anew(comm: Communicator, subject: Subject) -> None:
    model, fresh = make_model(), make_model(seed=3)
    optimizer = subject.build(model, comm)
    train(model, optimizer, range(FREEZE + 3))
    optimizer.reset_state()
    assert optimizer.steps == 0
    assert optimizer.frozen == (subject.entry.freeze_option is None)
    fresh.load_state_dict(model.state_dict())
    again = subject.build(fresh, comm)
    steps = range(FREEZE + 3, 2 * FREEZE + 6)
    assert train(model, optimizer, steps) == train(fresh, again, steps)


@behaviour(2)
def eval_shows_common_weights_and_train_the_ranks_own(comm: Communicator, subject: Subject) -> None:
    for moment in (3, FREEZE + 3, LOCAL + 1, LOCAL + 4):
        model = make_model()
        optimizer = subject.build(model, comm)
        train(model, optimizer, range(moment))
        own, sent, before = weights(model), optimizer.bytes_sent, snapshot(model, optimizer)
        optimizer.eval()
        assert alike(comm, model)
        assert optimizer.bytes_sent == sent
        optimizer.eval()
        loss_of(model, comm.rank, 99).backward()
        with pytest.raises(RuntimeError, match=r"step\(\) was called after eval\(\): call optimizer.train\(\) first"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.train()
        assert torch.equal(weights(model), own)
        assert same(before, snapshot(model, optimizer))
        train(model, optimizer, [moment])
        assert optimizer.last_step.applied


@behaviour(2)
def synchronize_weights_makes_all_ranks_alike_and_costs_nothing_where_they_are(
    comm: Communicator, subject: Subject
) -> None:
    model = make_model()
    optimizer = subject.build(model, comm)
    train(model, optimizer, range(LOCAL + 1))
    assert optimizer.in_sync != subject.entry.local_steps
    optimizer.synchronize_weights()
    assert optimizer.in_sync
    assert alike(comm, model)
    before, sent = snapshot(model, optimizer), optimizer.bytes_sent
    optimizer.synchronize_weights()
    assert optimizer.bytes_sent == sent
    assert same(before, snapshot(model, optimizer))


@behaviour(2)
def copies_are_refused(comm: Communicator, subject: Subject) -> None:
    optimizer = subject.build(make_model(), comm)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=rf"a {subject.name} cannot be copied or pickled.*state_dict\(\) on every"):
            copied(optimizer)


@behaviour(4)
def a_compressed_step_sends_a_thirty_second_of_fp32_in_two_calls(comm: Communicator, subject: Subject) -> None:
    weight = nn.Parameter(torch.ones(300_001))
    optimizer = subject.build_on([weight], comm, block_size=2048, bucket_bytes=1 << 22)
    traffic = exchange_comm(optimizer).traffic
    for step in range(FREEZE + 2):
        sent, uncompressed, calls = optimizer.bytes_sent, optimizer.bytes_uncompressed, traffic.calls
        weight.grad = None
        (weight * (comm.rank + step - 3.5)).sum().backward()
        optimizer.step()
    ring = 2 * 3 / 4 * 300_001
    assert optimizer.bytes_sent - sent <= 1.1 * ring / 8
    assert optimizer.bytes_uncompressed - uncompressed == round(ring * 4)
    # Beside the two legs, norms of layers where there are any.
    assert traffic.calls - calls <= (2 if subject.entry.elementwise else 4)
