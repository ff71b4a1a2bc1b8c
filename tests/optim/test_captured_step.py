"""What cannot be captured is refused when it is asked for; the fake device's cases are of what can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from thinwire.comm import Communicator, LoggedCommunicator, OperationLog, threads
from thinwire.optim import CapturedStep
from thinwire.optim.adam import Adam
from thinwire.optim.lamb import Lamb
from thinwire.optim.replicated.capture import CudaGraphs, check_can_be_captured


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda weights: thinwire.OneBitAdam(weights), "parameters on a CUDA device, they are on cpu"),
        (lambda weights: thinwire.OneBitAdam(weights, stage=1), "at stage 0, got OneBitAdam at stage 1"),
        (lambda weights: torch.optim.AdamW(weights), "takes a OneBitAdam at stage 0, got AdamW"),
    ],
)
def test_other_optimizers_are_refused(build: Callable[[Any], Any], says: str) -> None:
    optimizer = build(nn.Linear(3, 2).parameters())
    with pytest.raises(TypeError, match=says):
        CapturedStep(optimizer, lambda: None)


@pytest.mark.parametrize(
    ("algorithm", "by_node", "clips", "says"),
    [
        (Lamb("update"), False, False, "use OneBitAdam"),
        (Adam("update"), True, False, "ranks of a node"),
        (Adam("update"), False, True, "max_norm= has it estimate norms"),
    ],
)
def test_steps_that_differ_every_time_are_refused(algorithm: Any, by_node: bool, clips: bool, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        check_can_be_captured("OneBit", algorithm, by_node, clips)


def test_the_host_takes_no_part_in_captured_collectives() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="collectives over threads cannot be captured"):
            CudaGraphs.check(comm)

    threads.run(body, 2)
    alone = threads.single(10.0)
    CudaGraphs.check(alone)
    with pytest.raises(ValueError, match="whose times are logged"):
        CudaGraphs.check(LoggedCommunicator(alone, OperationLog()))
