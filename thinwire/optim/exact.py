"""Optimizers that torch lacks, uncompressed and, but for LAMB, elementwise: torch optimizers, which ShardedOptimizer
shards. LAMB is Adam's update times a trust ratio a parameter (You et al. 2020, arXiv 1904.00962); Lion the sign of a
momentum (Chen et al. 2023, arXiv 2302.06675); quasi-hyperbolic Adam mixes gradient and momentum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override


def check_not_negative(**values: float) -> None:
    """Raise ValueError for a value below 0, or NaN."""
    for name, value in values.items():
        if isinstance(value, str) or not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value!r}")


def check_betas(betas: tuple[float, float]) -> None:
    """Raise ValueError unless both are from 0 up to, and without, 1."""
    pair = betas if isinstance(betas, tuple | list) and len(betas) == 2 else ("", "")
    if any(isinstance(beta, str) or not 0 <= beta < 1 for beta in pair):
        raise ValueError(f"betas must be two numbers from 0 to below 1, got {betas}")


class ExactOptimizer(torch.optim.Optimizer):
    """One that steps the parameters of a group that have a gradient together."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the parameters that have a gradient; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin_step()
        for group in self.param_groups:
            self._move_group(group)
        return loss

    def _begin_step(self) -> None:
        """Forget the last step."""

    def _move_group(self, group: dict[str, Any]) -> None:
        moved = [parameter for parameter in group["params"] if parameter.grad is not None]
        if moved:
            self._move(moved, group)

    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Step parameters of one group, all of which have gradients."""
        raise NotImplementedError

    def _moments(
        self, parameters: Sequence[Tensor], betas: tuple[float, float]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[float]]:
        """Gradients; Adam's moments and step counts, with these taken in."""
        for parameter in parameters:
            if not self.state[parameter]:
                moments = {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
                self.state[parameter].update(step=torch.zeros(()), **moments)
        states = [self.state[parameter] for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        means, variances = [one["exp_avg"] for one in states], [one["exp_avg_sq"] for one in states]
        torch._foreach_mul_(means, betas[0])
        torch._foreach_add_(means, gradients, alpha=1 - betas[0])
        torch._foreach_mul_(variances, betas[1])
        torch._foreach_addcmul_(variances, gradients, gradients, value=1 - betas[1])
        torch._foreach_add_([one["step"] for one in states], 1)
        return gradients, means, variances, [float(one["step"]) for one in states]


class Lamb(ExactOptimizer):
    """LAMB with the formulas and names of FusedLamb. Sharded, every parameter lies whole on one rank.

    m ← β₁m + (1 - β₁)g, v ← β₂v + (1 - β₂)g²; u = m / (√v + ε) + λw; w ← w - η·c·u with c = ‖w‖ / ‖u‖ within
    [`min_coeff`, `max_coeff`], 1 where either norm is 0, and η = lr·√(1 - β₂ᵗ) / (1 - β₁ᵗ), or lr without
    `bias_correction`. `eps_inside_sqrt`: √(v + ε) in the place of √v + ε.

    Raises ValueError for values out of range.
    """

    whole_parameters = staticmethod(lambda group: True)

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
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        defaults |= {"eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay}
        defaults |= {"max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, defaults)
        self._coefficients: list[Tensor] = []

    @override
    def _begin_step(self) -> None:
        self._coefficients = []

    def get_lamb_coeffs(self) -> list[float]:
        """The trust ratios of the last step, a number a parameter that moved in it."""
        return [float(one) for of_group in self._coefficients for one in of_group.tolist()]

    @override
    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        _, means, variances, steps = self._moments(parameters, group["betas"])
        inside, outside = (group["eps"], 0.0) if group["eps_inside_sqrt"] else (0.0, group["eps"])
        roots = torch._foreach_sqrt(torch._foreach_add(variances, inside) if inside else variances)
        torch._foreach_add_(roots, outside)
        updates = torch._foreach_div(means, roots)
        if group["weight_decay"]:
            torch._foreach_add_(updates, list(parameters), alpha=group["weight_decay"])
        ratios = _trust_ratios(parameters, updates, group["min_coeff"], group["max_coeff"])
        rates = ratios * ratios.new_tensor([_rate(group, step) for step in steps])
        torch._foreach_mul_(updates, list(rates.unbind()))
        torch._foreach_sub_(parameters, updates)
        self._coefficients.append(ratios)


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


class Lion(ExactOptimizer):
    """w ← (1 - ηλ)w - η·sign(β₁m + (1 - β₁)g), m ← β₂m + (1 - β₂)g. Elementwise.

    Raises ValueError for values out of range.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        check_not_negative(lr=lr, weight_decay=weight_decay)
        check_betas(betas)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @override
    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
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


class QHAdamW(ExactOptimizer):
    """Quasi-hyperbolic Adam with decoupled weight decay (Ma and Yarats 2019, arXiv 1810.06801). Elementwise.

    m ← β₁m + (1 - β₁)g, v ← β₂v + (1 - β₂)g²; w ← (1 - ηλ)w - η((1 - ω)g + ω·m / (1 - β₁ᵗ)) / (√(v / (1 - β₂ᵗ)) + ε).
    With ω = 1 it is AdamW. A momentum so slow that it outlives the interval of local steps keeps what workers have in
    common (arXiv 2510.05361), while the gradient's own share answers at once. The default β₁ halves in 138 steps; as
    `thinwire.DiLoCo`'s inner optimizer it halves in five intervals, unless `betas` are given.

    Raises ValueError for values out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.995, 0.999),
        omega: float = 0.9,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        if not 0 <= omega <= 1:
            raise ValueError(f"omega must be from 0 to 1, got {omega}")
        super().__init__(params, {"lr": lr, "betas": betas, "omega": omega, "eps": eps, "weight_decay": weight_decay})

    @staticmethod
    def for_interval(every: int) -> dict[str, Any]:
        """Options for local steps: β₁ halves in five intervals of `every` steps."""
        return {"betas": (0.5 ** (1 / (5 * every)), 0.999)}

    @override
    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        (beta1, beta2), omega, lr = group["betas"], group["omega"], float(group["lr"])
        gradients, means, variances, steps = self._moments(parameters, group["betas"])
        roots = torch._foreach_sqrt(torch._foreach_div(variances, [1 - beta2**step for step in steps]))
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_mul(means, [omega / (1 - beta1**step) for step in steps])
        torch._foreach_add_(updates, gradients, alpha=1 - omega)
        torch._foreach_div_(updates, roots)
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-lr)


class Adam(torch.optim.Adam):
    """w -= lr · m / (√v + ε), by torch's own kernels. Arguments and state are those of torch.optim.Adam, whose
    checkpoints it takes up, and the other way round.

    A kernel divides the moments by 1 - βᵗ. It is told that t is infinite, of which βᵗ is 0 and the divisor 1, to the
    last bit; `step` in the state counts all the same.
    """

    @override
    def _init_group(self, group: dict[str, Any], *found: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *found)  # type: ignore[no-untyped-call]
        steps = found[-1]
        if steps:
            torch._foreach_add_(steps, 1)
            steps[:] = [torch.full_like(one, math.inf) for one in steps]
        return has_complex


class AdamW(Adam):
    """The same with decoupled weight decay, 0 where none is given."""

    def __init__(self, params: ParamsT, **options: Any) -> None:
        super().__init__(params, **{**options, "decoupled_weight_decay": True})


UNCORRECTED: Mapping[str, Callable[..., torch.optim.Optimizer]] = {"Adam": Adam, "AdamW": AdamW}
"""Adam and AdamW without the bias correction that torch's own always make: `"bias_correction": false`."""
