"""`ignore_unused_parameters` false: a parameter without a gradient is an error at the step, on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinwire import initialize
from thinwire.comm import threads
from thinwire.engine.model import UnusedParametersError


class Forked(nn.Module):
    """Uses its second layer where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(3, 3)
        self.sometimes = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.nothing = nn.Parameter(torch.zeros(0))
        generator = torch.Generator().manual_seed(5)  # not the global one, which ranks on threads share
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        hidden = self.always(inputs)
        return (self.sometimes(hidden) if both else hidden).square().mean() + self.nothing.sum()


def config(stage: int, ignore: bool) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "ignore_unused_parameters": ignore},
    }


def steps(stage: int, ignore: bool, used: list[tuple[bool, bool]]) -> list[torch.Tensor]:
    """Weights after steps whose micro-batches use the second layer as `used` says on rank 1, and always on rank 0."""

    def body(comm):
        engine, *_ = initialize(model=Forked(), config=config(stage, ignore), comm=comm)
        for micro_batches in used:
            for both in micro_batches:
                engine.backward(engine(torch.ones(2, 3), both or comm.rank == 0))
                engine.step()
        return engine.module.always.weight.detach().clone()

    return threads.run(body, 2)


@pytest.mark.parametrize("stage", [1, 2])
def test_steps_that_use_every_parameter_are_as_ever(stage: int) -> None:
    """One of the micro-batches is enough."""
    used = [(True, True), (False, True), (True, False)]
    assert torch.equal(steps(stage, False, used)[0], steps(stage, True, used)[0])


@pytest.mark.parametrize("stage", [1, 2])
def test_an_unused_parameter_is_an_error_by_name_on_every_rank(stage: int) -> None:
    def body(comm):
        engine, *_ = initialize(model=Forked(), config=config(stage, ignore=False), comm=comm)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 3), comm.rank == 0))
            if engine.is_gradient_accumulation_boundary():
                kind, message = UnusedParametersError, "parameters.* 2 of 4 .*sometimes.weight, sometimes.bias"
                if comm.rank == 0:
                    kind, message = ValueError, "rank 1 could not use all of its parameters"
                with pytest.raises(kind, match=message):
                    engine.step()
            else:
                engine.step()

    threads.run(body, 2)


def test_by_default_it_is_left_alone() -> None:
    assert steps(2, True, [(False, False)])
