"""What the loss is multiplied by, and what gradients are clipped to."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.optim.subject import FREEZE, LOCAL, Subject, alike, behaviour, next_send, with_gradients
from tests.optim.training import loss_of, make_model, train, weights
from thinwire.comm import Communicator
from thinwire.optim.step import Send
from thinwire.zero.gradient_seal import SentGradient


@behaviour(2, of_home=True)
def clipping_is_by_the_averaged_gradients_norm(comm: Communicator, subject: Subject) -> None:
    model, optimizer = subject.on_model(comm, max_norm=0.05)
    for step in range(LOCAL + 2):
        own = torch.autograd.grad(loss_of(model, comm.rank, step), list(model.parameters()))
        gradient = torch.cat([one.reshape(-1) for one in own])
        comm.all_reduce(gradient, "mean")
        exact, send = float(gradient.norm()), next_send(optimizer)
        train(model, optimizer, [step])
        if send is Send.LOCAL:  # nobody hears of the others' gradients
            assert math.isnan(optimizer.last_step.grad_norm)
        else:
            tolerance = 1e-5 if send is Send.EXACT and subject.wire == "fp32" else 0.06 if send is Send.EXACT else 1e-3
            assert optimizer.last_step.grad_norm == pytest.approx(exact, rel=tolerance)


@behaviour(2)
def an_exact_step_is_clipped_as_torch_does(comm: Communicator, subject: Subject) -> None:
    """Beside it trains one that does not clip, on averaged gradients that torch has clipped."""
    if subject.wire != "fp32":  # clips what came back
        return
    model, twin = make_model(), make_model()
    optimizer = subject.build(model, comm, max_norm=0.05)
    plain = subject.build(twin, comm, max_norm=None)
    assert plain.max_norm == 0.0
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
    for moment in (*subject.moments, *([LOCAL] if subject.entry.local_steps else [])):
        model, optimizer = subject.on_model(comm, moment, max_norm=0.05)
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
    model, optimizer = subject.on_model(comm)
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


@behaviour(2, of_home=True)
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


@behaviour(3, of_home=True)
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


@behaviour(2, of_home=True)
def a_loss_scale_of_ones_own_is_divided_out(comm: Communicator, subject: Subject) -> None:
    found = []
    for scale in (1.0, 64.0):
        model, optimizer = subject.on_model(comm, weight_decay=0.1)
        for step in range(16):
            optimizer.zero_grad()
            optimizer.loss_scale = scale * 2.0 ** (step // 6) if scale > 1 else 1.0
            (optimizer.loss_scale * loss_of(model, comm.rank, step)).backward()
            optimizer.step()
        optimizer.synchronize_weights()
        found.append(weights(model))
    assert torch.equal(*found)


@behaviour(2, of_home=True)
def gradients_changed_after_backward_are_an_error(comm: Communicator, subject: Subject) -> None:
    """Where they have been let go already nothing is there to change, and that is the error."""
    model, optimizer = subject.on_model(comm)
    for moment in (0, *subject.moments, LOCAL + 1):
        for how in ("clip", "clip data", "halve", "negate an element", "replace", "sparse", "reshape", "drop"):
            train(model, optimizer, range(optimizer.steps, moment))
            optimizer.zero_grad()
            loss_of(model, comm.rank, 0).backward()
            with pytest.raises(RuntimeError, match=r"gradient of .*max_norm"):
                _edit_and_step(model, optimizer, how)
            optimizer.zero_grad()
    train(model, optimizer, range(2))
    optimizer.synchronize_weights()
    assert alike(comm, model)


def _edit_and_step(model: nn.Module, optimizer: Any, how: str) -> None:
    _edit(model, how)
    optimizer.step()


@torch.no_grad()
def _edit(model: nn.Module, how: str) -> None:
    weight = model[2].weight
    if how == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif how == "clip data":
        for parameter in model.parameters():
            parameter.grad.data.clamp_(-1e-6, 1e-6)
    elif how == "halve":
        weight.grad.mul_(0.5)
    elif how == "negate an element":
        model[4].bias.grad[0].neg_()
    elif how == "reshape":
        weight.grad.data = torch.ones(3)
    else:
        others = {"replace": torch.ones_like(weight), "sparse": torch.ones_like(weight).to_sparse(), "drop": None}
        weight.grad = others[how]


@behaviour(2, warns="as torch.nn.utils.clip_grad_norm_ does in a step that it does not clip", at=(0, 1), of_home=True)
def gradients_written_with_their_own_values_are_no_error(comm: Communicator, subject: Subject) -> None:
    """As by `clip_grad_norm_(..., inf)`, by which trainers measure the norm; in a run beside, nobody does. One that
    will clip looks the same until then, so that the first is warned of."""
    model, beside = make_model(), make_model()
    optimizer, other = subject.build(model, comm), subject.build(beside, comm)
    for step in range(FREEZE + 3):
        optimizer.zero_grad()
        loss_of(model, comm.rank, step).backward()
        if all(isinstance(one.grad, SentGradient) for one in model.parameters()):
            with pytest.raises(
                RuntimeError, match=r"gradient of .*'0.weight'.* left for its owner.*last_step.grad_norm"
            ):
                torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()
        train(beside, other, range(step, step + 1))
        assert torch.equal(weights(model), weights(beside))
