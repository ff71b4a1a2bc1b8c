"""Bias correction, made and left out, against float64: of 1-bit optimizers in both homes, and of Adam and AdamW."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from thinwire.comm import Communicator, threads
from thinwire.optim import OneBitAdam, ZeroOneAdam
from thinwire.zero import ShardedOptimizer
from thinwire.zero.optimizer import Adam, AdamW

NUMEL, RANKS, LR, BETAS, EPS = 77, 2, 0.01, (0.8, 0.95), 1e-3
DECAY = 0.1


def gradient(rank: int, step: int) -> Tensor:
    """With no element near zero, where 0/1 Adam raises denominators."""
    generator = torch.Generator().manual_seed(50 * rank + step)
    signs = torch.where(torch.rand(NUMEL, generator=torch.Generator().manual_seed(9)) < 0.5, -1.0, 1.0)
    return signs * (0.5 + torch.rand(NUMEL, generator=generator))


class Reference:
    """Adam in float64."""

    def __init__(self, corrects: bool, decoupled: bool = True) -> None:
        self.corrects, self.decoupled = corrects, decoupled
        self.weights, self.m, self.v = np.ones(NUMEL), np.zeros(NUMEL), np.zeros(NUMEL)
        self.steps = 0

    def step(self, gradient: np.ndarray) -> None:
        self.steps += 1
        if self.decoupled:
            self.weights *= 1 - LR * DECAY
        else:
            gradient = gradient + DECAY * self.weights
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * gradient
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * gradient**2
        first, second = ((1 - beta**self.steps if self.corrects else 1.0) for beta in BETAS)
        self.weights -= LR * (self.m / first) / (np.sqrt(self.v / second) + EPS)

    def train(self, ranks: int, steps: int) -> np.ndarray:
        for step in range(steps):
            self.step(np.mean([gradient(rank, step).double().numpy() for rank in range(ranks)], axis=0))
        return self.weights


def train(optimizer: Any, parameter: Tensor, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        (parameter * gradient(rank, step)).sum().backward()
        optimizer.step()


def make(
    optimizer_class: Any, comm: Communicator, stage: int, corrects: bool, freeze_step: int = 99
) -> tuple[Any, Tensor]:
    parameter = torch.nn.Parameter(torch.ones(NUMEL))
    options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "comm": comm, "stage": stage}
    if optimizer_class in (Adam, AdamW):  # which make no correction
        return ShardedOptimizer([parameter], optimizer_class, block_size=8, **options), parameter
    options |= {"freeze_step": freeze_step} if optimizer_class is OneBitAdam else {}
    return optimizer_class([parameter], block_size=64, bias_correction=corrects, **options), parameter


EXACT = [
    *((OneBitAdam, stage, corrects, True) for stage in (0, 1, 2) for corrects in (True, False)),
    *((ZeroOneAdam, stage, corrects, True) for stage in (0, 1) for corrects in (True, False)),
    *((optimizer, stage, False, optimizer is AdamW) for stage in (0, 1, 2) for optimizer in (AdamW, Adam)),
]


@pytest.mark.parametrize(("optimizer_class", "stage", "corrects", "decoupled"), EXACT)
def test_exact_steps_are_adams(optimizer_class: Any, stage: int, corrects: bool, decoupled: bool) -> None:
    def body(comm: Communicator) -> Tensor:
        optimizer, parameter = make(optimizer_class, comm, stage, corrects)
        train(optimizer, parameter, comm.rank, range(7))
        return parameter.detach().clone()

    found = threads.run(body, RANKS)[0].numpy()
    np.testing.assert_allclose(found, Reference(corrects, decoupled).train(RANKS, 7), rtol=2e-6)
    assert np.abs(found - Reference(not corrects, decoupled).train(RANKS, 7)).max() > 1e-3


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_frozen_steps_move_by_what_the_ranks_agreed_on(stage: int, corrects: bool) -> None:
    def body(comm: Communicator) -> None:
        optimizer, parameter = make(OneBitAdam, comm, stage, corrects, freeze_step=3)
        train(optimizer, parameter, comm.rank, range(4))
        assert optimizer.frozen
        for step in range(4, 7):
            before = parameter.detach().clone()
            train(optimizer, parameter, comm.rank, range(step, step + 1))
            update = torch.zeros(NUMEL)
            for one in optimizer.saved_slices():
                if one.kind in ("exp_avg", "momentum"):
                    update[one.start : one.start + one.tensor.numel()] = one.tensor.view(-1)
            comm.all_reduce(update)
            assert bool(update.all())
            correction = 1 - BETAS[0] ** (step + 1) if corrects else 1.0
            expected = before * (1 - LR * DECAY) - LR * update / correction
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-6)

    threads.run(body, RANKS)


@pytest.mark.parametrize("kernel", [{}, {"foreach": True}, {"fused": True}, {"maximize": True}, {"amsgrad": True}])
def test_every_kernel_leaves_the_correction_out(kernel: dict[str, Any]) -> None:
    parameters = [torch.nn.Parameter(torch.ones(NUMEL)) for _ in range(2)]
    optimizer = AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **kernel)
    reference = Reference(False)
    for step in range(5):
        of_step = gradient(0, step)
        parameters[0].grad, parameters[1].grad = of_step.clone(), None
        optimizer.step()
        reference.step(of_step.double().numpy() * (-1 if "maximize" in kernel else 1))
    if "amsgrad" in kernel:
        assert set(optimizer.state[parameters[0]]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    else:
        np.testing.assert_allclose(parameters[0].detach().numpy(), reference.weights, rtol=2e-6)
    assert optimizer.state[parameters[0]]["step"] == 5
    assert bool((parameters[1] == 1).all())


def test_torchs_adamw_takes_up_its_state() -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(NUMEL)) for _ in range(2))
    one, other = AdamW([ours], lr=LR), torch.optim.AdamW([theirs], lr=LR)
    ours.grad = gradient(0, 0)
    one.step()
    other.load_state_dict(one.state_dict())
    assert other.state[theirs]["step"] == 1
    torch.testing.assert_close(other.state[theirs]["exp_avg_sq"], 0.001 * gradient(0, 0) ** 2)
    with pytest.raises(ValueError, match="Invalid"):
        AdamW([ours], betas=(1.0, 0.9))
