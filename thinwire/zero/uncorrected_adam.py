"""Adam and AdamW without bias correction, which torch's own always make: `"bias_correction": false`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

__all__ = ["Adam", "AdamW"]


class Adam(torch.optim.Optimizer):
    """w -= lr · m / (√v + ε), by torch's own kernels. Arguments and state are those of torch.optim.Adam, whose
    checkpoints it takes up, and the other way round.

    A kernel divides the moments by 1 - βᵗ. It is told that t is infinite, of which βᵗ is 0 and the divisor 1, to the
    last bit; `step` in the state counts all the same.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        settings: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        torch.optim.Adam([torch.zeros(1)], **settings)  # it checks them
        super().__init__(params, settings)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            members = [one for one in group["params"] if one.grad is not None]
            if members:
                self._step_group(group, members)
        return loss

    def _step_group(self, group: dict[str, Any], members: list[Tensor]) -> None:
        states = [self._state_of(one, group) for one in members]
        torch._foreach_add_([state["step"] for state in states], 1)
        never = torch.full((), math.inf, device=states[0]["step"].device)
        beta1, beta2 = group["betas"]
        adam(
            members,
            [one.grad for one in members if one.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            [never] * len(members),
            foreach=group["foreach"],
            capturable=group["capturable"],
            fused=group["fused"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            on_device = group["capturable"] or group["fused"]
            state["step"] = torch.zeros((), device=parameter.device if on_device else "cpu")
            for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


class AdamW(Adam):
    """The same with decoupled weight decay, 0 where none is given."""

    def __init__(self, params: ParamsT, **options: Any) -> None:
        super().__init__(params, **{**options, "decoupled_weight_decay": True})
