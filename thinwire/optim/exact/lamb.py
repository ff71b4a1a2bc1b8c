"""LAMB: Adam's update, times a trust ratio a parameter (You et al. 2020, arXiv 1904.00962)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.optim.exact.checks import check_betas, check_not_negative

__all__ = ["Lamb"]


class Lamb(torch.optim.Optimizer):
    """LAMB with the formulas and names of DeepSpeed's FusedLamb. Sharded, every parameter lies whole on one rank.

    m ← β₁m + (1 - β₁)g, v ← β₂v + (1 - β₂)g²; u = m / (√v + ε) + λw; w ← w - η·c·u with c = ‖w‖ / ‖u‖ within
    [`min_coeff`, `max_coeff`], 1 where either norm is 0, and η = lr·√(1 - β₂ᵗ) / (1 - β₁ᵗ), or lr without
    `bias_correction`. `eps_inside_sqrt`: √(v + ε) in the place of √v + ε.

    Raises ValueError for values out of range.
    """

    whole_parameters = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay, min_coeff=min_coeff)
        check_betas(betas)
        if not min_coeff <= max_coeff:
            raise ValueError(f"max_coeff must be at least min_coeff, {min_coeff}, got {max_coeff}")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)
        self._coefficients: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the parameters that have a gradient; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._coefficients = []
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            if moved:
                self._coefficients.append(self._move(moved, group))
        return loss

    def get_lamb_coeffs(self) -> list[float]:
        """The trust ratios of the last step, a number a parameter that moved in it."""
        return [float(one) for of_group in self._coefficients for one in of_group.tolist()]

    def _move(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> Tensor:
        """Step parameters of one group; returns their trust ratios, [parameters]."""
        states = [self._state_of(parameter) for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        beta1, beta2 = group["betas"]
        means, variances = [one["exp_avg"] for one in states], [one["exp_avg_sq"] for one in states]
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, gradients, alpha=1 - beta1)
        torch._foreach_mul_(variances, beta2)
        torch._foreach_addcmul_(variances, gradients, gradients, value=1 - beta2)
        inside, outside = (group["eps"], 0.0) if group["eps_inside_sqrt"] else (0.0, group["eps"])
        roots = torch._foreach_sqrt(torch._foreach_add(variances, inside) if inside else variances)
        torch._foreach_add_(roots, outside)
        updates = torch._foreach_div(means, roots)
        if group["weight_decay"]:
            torch._foreach_add_(updates, list(parameters), alpha=group["weight_decay"])
        ratios = _trust_ratios(parameters, updates, group["min_coeff"], group["max_coeff"])
        rates = ratios * ratios.new_tensor([_rate(group, float(one["step"])) for one in states])
        torch._foreach_mul_(updates, list(rates.unbind()))
        torch._foreach_sub_(list(parameters), updates)
        return ratios

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Its state, with this step counted."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        return state


def _trust_ratios(parameters: Sequence[Tensor], updates: Sequence[Tensor], least: float, most: float) -> Tensor:
    weights = torch.stack(torch._foreach_norm(list(parameters))).float()
    steps = torch.stack(torch._foreach_norm(list(updates))).float()
    says_nothing = (weights == 0) | (steps == 0)
    return torch.where(says_nothing, 1.0, (weights / steps).clamp(least, most))


def _rate(group: dict[str, Any], step: float) -> float:
    if not group["bias_correction"]:
        return float(group["lr"])
    beta1, beta2 = group["betas"]
    return float(group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step))
