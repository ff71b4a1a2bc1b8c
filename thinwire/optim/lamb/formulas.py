"""What LAMB adds to Adam: a coefficient a layer. The formulas of 1-bit LAMB (Li et al. 2021, arXiv 2104.06069), apart
from buckets and ranks so that they can be read beside the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.formulas import AdamSettings, roots

__all__ = [
    "LAMB_OPTIONS",
    "LambSettings",
    "Layer",
    "begin_fresh",
    "check_lamb_options",
    "greatest_growths",
    "square_norms",
    "trust_ratio",
]

LAMB_OPTIONS = ("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold")
"""The hyperparameters of a parameter group that Adam does not have."""


@dataclass(frozen=True)
class LambSettings(AdamSettings):
    """The hyperparameters of one parameter group; see OneBitLamb."""

    max_coeff: float
    min_coeff: float
    coeff_beta: float
    factor_max: float
    factor_min: float
    factor_threshold: float

    @classmethod
    def of_group(cls, group: dict[str, Any]) -> LambSettings:
        """Read them from an entry of `optimizer.param_groups`."""
        return cls(
            **vars(AdamSettings.of_group({**group, "eps_inside_sqrt": False})),
            **{name: group[name] for name in LAMB_OPTIONS},
        )


@dataclass
class Layer:
    """What 1-bit LAMB remembers of one parameter.

    `coefficient`: the moving average of its trust ratios, and `mass`, what their weights add up to so far. `factor`: by
    how much the frozen coefficient was multiplied last. `scale`: what its momentum is multiplied by on the wire.
    """

    coefficient: float = 0.0
    mass: float = 0.0
    factor: float = 1.0
    scale: float = 1.0

    @property
    def frozen_coefficient(self) -> float:
        """c: the average of the trust ratios; 1 for a layer that never had one."""
        return self.coefficient / self.mass if self.mass else 1.0

    def smooth(self, ratio: float, settings: LambSettings) -> None:
        """c ← β_c c + (1 - β_c) ratio."""
        beta = settings.coeff_beta
        self.coefficient = beta * self.coefficient + (1 - beta) * ratio
        self.mass = beta * self.mass + (1 - beta)

    def follow(self, growth: float, share: float, settings: LambSettings) -> float:
        """The coefficient of a frozen step, c · r; r is kept as `factor`.

        `growth`: the largest √v_frozen / √v_fresh of the layer. `share`: of the update's norm, what it would be without
        weight decay, at most 1; the rest does not depend on v.
        """
        blended = growth * share + (1 - share)
        bounded = min(max(blended, settings.factor_min), settings.factor_max)
        slowest = self.factor * (1 - settings.factor_threshold)
        fastest = self.factor * (1 + settings.factor_threshold)
        self.factor = min(max(bounded, slowest), fastest)
        return self.frozen_coefficient * self.factor


def trust_ratio(weight_norm: float, update_norm: float, settings: LambSettings) -> float | None:
    """‖w‖ / ‖update‖ within [min_coeff, max_coeff]; None where one of them is zero, which says nothing."""
    if not weight_norm or not update_norm:
        return None
    return min(max(weight_norm / update_norm, settings.min_coeff), settings.max_coeff)


def begin_fresh(fresh: list[Tensor], denominators: list[Tensor], settings: AdamSettings, step: int) -> None:
    """Make each fresh variance, in place, the one that the frozen `denominators` D = √v̂ + ε stand for.

    It is kept over D², which has no units, and infinite where D is, at coordinates that stay.
    """
    for variance, denominator in zip(fresh, denominators, strict=True):
        torch.reciprocal(denominator, out=variance)
        variance.mul_(-settings.eps).add_(1.0).square_().mul_(settings.second_correction(step))
        variance.masked_fill_(torch.isinf(denominator), float("inf"))


def greatest_growths(fresh: list[Tensor], denominators: list[Tensor], settings: AdamSettings, step: int) -> Tensor:
    """The largest (√v̂ + ε) / (√v̂' + ε) of each layer, v' fresh and v frozen: fp32 [layers]; 0 where all stay."""
    growths = roots(fresh, settings, step)
    torch._foreach_add_(growths, torch._foreach_reciprocal(denominators), alpha=settings.eps)
    torch._foreach_reciprocal_(growths)
    return torch.stack(torch._foreach_max(growths))


def square_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The squares of the 2-norms: fp64 [tensors], squares of fp32 numbers, so that roots give these again."""
    return torch.stack(torch._foreach_norm(list(tensors))).double().square()


def check_lamb_options(group: Mapping[str, Any]) -> None:
    """Raise ValueError for a parameter group, or defaults for one, whose LAMB hyperparameters cannot work."""
    if not 0 < group["min_coeff"] <= group["max_coeff"]:
        raise ValueError(
            f"min_coeff must be above 0 and at most max_coeff, got min_coeff {group['min_coeff']} and max_coeff "
            f"{group['max_coeff']}"
        )
    if not 0 <= group["coeff_beta"] < 1:
        raise ValueError(f"coeff_beta must be from 0 up to, not including, 1; got {group['coeff_beta']}")
    if not 0 < group["factor_min"] <= 1 <= group["factor_max"]:
        raise ValueError(
            "factor_min must be above 0 and at most 1, and factor_max at least 1, as the factor begins at 1; got "
            f"factor_min {group['factor_min']} and factor_max {group['factor_max']}"
        )
    if not 0 <= group["factor_threshold"] < 1:
        raise ValueError(f"factor_threshold must be from 0 up to, not including, 1; got {group['factor_threshold']}")
