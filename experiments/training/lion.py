"""Lion in plain torch, as its authors describe it: the exact parent that 1-bit Lion is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

__all__ = ["Lion"]


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675, Algorithm 2): steps by the sign of a mixed momentum, decay decoupled.

    A parameter w with gradient g moves by -lr · (sign(β₁m + (1 - β₁)g) + λw); then m becomes β₂m + (1 - β₂)g. The sign
    of 0 is 0. Options as in thinwire.OneBitLion.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

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
            state["exp_avg"] = torch.zeros_like(weight)
        beta1, beta2 = group["betas"]
        momentum = state["exp_avg"]
        direction = momentum.lerp(gradient, 1 - beta1).sign_()
        weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
        momentum.lerp_(gradient, 1 - beta2)
