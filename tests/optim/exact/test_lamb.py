"""LAMB against its formulas in float64, one parameter after the other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from thinwire.optim import Lamb

SHAPES = [(7, 5), (13,), (3, 2, 4), ()]
SETTINGS = [
    {},
    {"weight_decay": 0.1, "betas": (0.7, 0.9), "eps": 1e-3},
    {"bias_correction": False, "eps_inside_sqrt": True, "eps": 0.1},
    {"max_coeff": 0.6, "min_coeff": 0.5, "lr": 0.3},
]


def by_formula(weight: Tensor, gradients: list[Tensor], **given) -> tuple[Tensor, float]:
    """(The weight after all steps, the last trust ratio)."""
    settings = torch.optim.Adam([weight]).defaults | {"eps_inside_sqrt": False, "bias_correction": True} | given
    lr, betas, eps, decay = (settings[name] for name in ("lr", "betas", "eps", "weight_decay"))
    least, most = given.get("min_coeff", 0.01), given.get("max_coeff", 10.0)
    weight = weight.double()
    mean, variance, ratio = torch.zeros_like(weight), torch.zeros_like(weight), 1.0
    for step, gradient in enumerate((one.double() for one in gradients), 1):
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        variance = betas[1] * variance + (1 - betas[1]) * gradient**2
        root = (variance + eps).sqrt() if settings["eps_inside_sqrt"] else variance.sqrt() + eps
        update = mean / root + decay * weight
        norms = float(weight.norm()), float(update.norm())
        ratio = min(max(norms[0] / norms[1], least), most) if all(norms) else 1.0
        corrected = math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step) if settings["bias_correction"] else 1.0
        weight = weight - lr * corrected * ratio * update
    return weight, ratio


@pytest.mark.parametrize("settings", SETTINGS)
def test_steps_are_those_of_the_formula(settings: dict) -> None:
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    parameters.append(torch.nn.Parameter(torch.zeros(6)))  # its norm says nothing
    begin = [one.detach().clone() for one in parameters]
    gradients = [[torch.randn(one.shape, generator=generator) for _ in range(9)] for one in parameters]
    optimizer = Lamb(parameters, **settings)
    for step in range(9):
        for parameter, of_parameter in zip(parameters, gradients, strict=True):
            parameter.grad = of_parameter[step].clone()
        optimizer.step()
    expected = [by_formula(one, of, **settings) for one, of in zip(begin, gradients, strict=True)]
    for parameter, (weight, _) in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach().double(), weight, rtol=2e-5, atol=2e-6)
    assert optimizer.get_lamb_coeffs() == pytest.approx([ratio for _, ratio in expected], rel=1e-4)


def test_parameters_without_a_gradient_stay_and_count_no_step() -> None:
    one, other = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = Lamb([{"params": [one, other]}], lr=0.1)
    for late in (False, False, True):
        one.grad = torch.ones(4)
        other.grad = torch.ones(4) if late else None
        optimizer.step()
        assert len(optimizer.get_lamb_coeffs()) == 1 + late
    assert torch.equal(other.detach(), by_formula(torch.ones(4), [torch.ones(4)], lr=0.1)[0].float())


def test_a_gradient_of_zero_moves_nothing() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.zeros(3)
    optimizer = Lamb([parameter])
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(3))
    assert optimizer.get_lamb_coeffs() == [1.0]


def test_a_closure_is_called_with_gradients_on() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = Lamb([parameter], lr=0.1)

    def closure() -> Tensor:
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert bool((parameter < 1).all())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0, got -1"),
        ({"eps": math.nan}, "eps must be at least 0, got nan"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers from 0 to below 1"),
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "max_coeff must be at least min_coeff, 2.0, got 1.0"),
    ],
)
def test_what_cannot_work(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lamb([torch.nn.Parameter(torch.ones(1))], **settings)
