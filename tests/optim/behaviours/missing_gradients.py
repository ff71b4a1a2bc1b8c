"""Parameters that a backward does not reach, on every rank or on some, foreseen or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optim.behaviours.behaviour import alike, behaviour
from tests.optim.subject import Subject, next_send
from tests.optim.training import make_model, train, weights
from thinwire.comm import Communicator
from thinwire.optim.step import Send


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
    for moment in (0, *subject.moments):
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
