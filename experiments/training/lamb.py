"""LAMB in plain torch, as its authors describe it: the exact parent that 1-bit LAMB is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

__all__ = ["Lamb"]


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2019, arXiv 1904.00962, Algorithm 2): Adam's update, decay included, in proportion to a layer.

    A parameter w moves by -lr · r · u with u = m̂ / (√v̂ + ε) + λw and r = ‖w‖/‖u‖ within [min_coeff, max_coeff], or 1
    where a norm is zero. Options as in thinwire.OneBitLamb.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Moves every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        state["step"] += 1
        beta1, beta2 = group["betas"]
        momentum = state["exp_avg"].lerp_(gradient, 1 - beta1)
        variance = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (variance / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        update = (momentum / denominator).div_(1 - beta1 ** state["step"]).add_(weight, alpha=group["weight_decay"])
        weight_norm, update_norm = float(weight.norm()), float(update.norm())
        ratio = 1.0
        if weight_norm and update_norm:
            ratio = min(max(weight_norm / update_norm, group["min_coeff"]), group["max_coeff"])
        weight.add_(update, alpha=-group["lr"] * ratio)
