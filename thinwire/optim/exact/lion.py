"""Lion: the sign of a momentum (Chen et al. 2023, arXiv 2302.06675)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from thinwire.optim.exact.checks import check_betas, check_not_negative

__all__ = ["Lion"]


class Lion(torch.optim.Optimizer):
    """w ← (1 - ηλ)w - η·sign(β₁m + (1 - β₁)g), m ← β₂m + (1 - β₂)g. Elementwise.

    Raises ValueError for values out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        check_not_negative(lr=lr, weight_decay=weight_decay)
        check_betas(betas)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the parameters that have a gradient; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            if moved:
                self._move(moved, group)
        return loss

    def _move(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        momenta = [self.state[parameter]["exp_avg"] for parameter in parameters]
        directions = torch._foreach_mul(momenta, beta1)
        torch._foreach_add_(directions, gradients, alpha=1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(parameters, 1 - float(group["lr"]) * group["weight_decay"])
        torch._foreach_add_(parameters, directions, alpha=-float(group["lr"]))
        torch._foreach_mul_(momenta, beta2)
        torch._foreach_add_(momenta, gradients, alpha=1 - beta2)
