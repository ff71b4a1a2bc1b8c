"""Lion against its two formulas, by hand."""

from __future__ import annotations

import pytest
import torch

from thinwire.optim import Lion


def test_steps_are_those_of_the_formula() -> None:
    generator = torch.Generator().manual_seed(2)
    parameter, idle = torch.nn.Parameter(torch.randn(5, 3, generator=generator)), torch.nn.Parameter(torch.ones(2))
    weight, momentum = parameter.detach().double(), torch.zeros(5, 3, dtype=torch.float64)
    optimizer = Lion([parameter, idle], lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    for _ in range(7):
        gradient = torch.randn(5, 3, generator=generator)
        parameter.grad = gradient
        optimizer.step()
        direction = (0.8 * momentum + 0.2 * gradient).sign()
        weight = (1 - 0.01 * 0.1) * weight - 0.01 * direction
        momentum = 0.95 * momentum + 0.05 * gradient
    torch.testing.assert_close(parameter.detach().double(), weight, rtol=1e-5, atol=1e-6)
    assert torch.equal(idle.detach(), torch.ones(2))


@pytest.mark.parametrize("settings", [{"lr": -1.0}, {"weight_decay": -0.1}, {"betas": (1.0, 0.5)}])
def test_what_cannot_work(settings: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        Lion([torch.nn.Parameter(torch.ones(1))], **settings)
