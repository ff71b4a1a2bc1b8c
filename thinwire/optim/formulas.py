"""Adam's arithmetic on lists of tensors, before and after the variance is frozen: the one place where
the formulas stand. Multi-tensor operations throughout, so that a GPU gets few launches; where the variance moves, one
pass over memory (`compress/kernels/adam.py`), with the same bits on every processor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.kernels.adam import AdamFactors, adam_step

__all__ = [
    "SMALLEST_OF_MEAN",
    "AdamSettings",
    "apply_updates",
    "bound_updates",
    "decay",
    "frozen_update",
    "hold_masked",
    "raise_smallest",
    "roots",
    "shaped_mask",
    "to_denominators",
    "track_moments",
    "track_variances",
    "variance_norm",
    "warmup_step",
]

SMALLEST_OF_MEAN = 0.01
"""The least frozen denominator of a parameter, as a part of their mean."""


@dataclass(frozen=True)
class AdamSettings:
    """The hyperparameters of one parameter group."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: bool
    eps_inside_sqrt: bool

    @classmethod
    def of_group(cls, group: dict[str, Any]) -> AdamSettings:
        """Read them from an entry of `optimizer.param_groups`."""
        beta1, beta2 = group["betas"]
        return cls(
            float(group["lr"]),
            beta1,
            beta2,
            group.get("eps", 0.0),
            group["weight_decay"],
            group.get("bias_correction", True),
            group.get("eps_inside_sqrt", False),
        )

    def first_correction(self, step: int) -> float:
        """1 - β₁ᵗ, or 1 without bias correction."""
        return 1 - self.beta1**step if self.bias_correction else 1.0

    def second_correction(self, step: int) -> float:
        """1 - β₂ᵗ, or 1 without bias correction."""
        return 1 - self.beta2**step if self.bias_correction else 1.0


def warmup_step(
    gradients: list[Tensor],
    weights: list[Tensor],
    momenta: list[Tensor],
    variances: list[Tensor],
    settings: AdamSettings,
    step: int,
) -> None:
    """AdamW, in place: m ← β₁ m + (1 - β₁) g, v ← β₂ v + (1 - β₂) g², w -= lr · m̂ / (√v̂ + ε)."""
    factors = replace(
        _factors(settings, step),
        decay=1 - settings.lr * settings.weight_decay,
        rate=settings.lr / settings.first_correction(step),
    )
    adam_step(factors, gradients=gradients, momenta=momenta, variances=variances, weights=weights)


def track_moments(
    gradients: list[Tensor],
    momenta: list[Tensor],
    variances: list[Tensor],
    denominators: list[Tensor],
    settings: AdamSettings,
    step: int,
) -> None:
    """m and v of `warmup_step`, in place, and √v̂ + ε into `denominators`, which may be the gradients."""
    factors = _factors(settings, step)
    adam_step(factors, gradients=gradients, momenta=momenta, variances=variances, denominators=denominators)


def track_variances(
    gradients: list[Tensor],
    variances: list[Tensor],
    settings: AdamSettings,
    denominators: list[Tensor] | None = None,
    step: int = 1,
) -> None:
    """v ← β₂ v + (1 - β₂) g², in place, and what the frozen stage divides by at `step` into `denominators`, if there
    are any: see `to_denominators`."""
    factors = replace(_factors(settings, step), holds_zero=True)
    adam_step(factors, gradients=gradients, momenta=None, variances=variances, denominators=denominators)


def frozen_update(
    weights: list[Tensor], momenta: list[Tensor], denominators: list[Tensor], settings: AdamSettings, step: int
) -> None:
    """w -= lr · m̂ / (√v + ε) in place, with v frozen; weight decay is decoupled, as in AdamW."""
    decay(weights, settings)
    torch._foreach_addcdiv_(weights, momenta, denominators, -settings.lr / settings.first_correction(step))


def apply_updates(weights: list[Tensor], updates: list[Tensor], settings: AdamSettings, step: int) -> None:
    """w -= lr · û in place, with u = m / (√v + ε) already divided; weight decay is decoupled, as in AdamW."""
    decay(weights, settings)
    torch._foreach_add_(weights, updates, alpha=-settings.lr / settings.first_correction(step))


def to_denominators(variances: list[Tensor], settings: AdamSettings, step: int) -> None:
    """Turn v, in place, into what the frozen stage divides by: √v̂ + ε, and infinity where v is 0.

    A coordinate whose gradient was always 0 would otherwise move by ± scale / ε at every step.
    """
    factors = replace(_factors(settings, step), holds_zero=True)
    adam_step(factors, gradients=None, momenta=None, variances=variances, denominators=variances)


def roots(variances: list[Tensor], settings: AdamSettings, step: int) -> list[Tensor]:
    """√v̂ of each, new: rounded as all of a step is, where torch.sqrt is up to one unit in the last place off."""
    factors = replace(_factors(settings, step), eps=0.0)
    found = [torch.empty_like(variance) for variance in variances]
    adam_step(factors, gradients=None, momenta=None, variances=variances, denominators=found)
    return found


def raise_smallest(denominators: list[Tensor]) -> None:
    """Raise each tensor's denominators, in place, to a hundredth of their mean; those that are infinite do not count.

    A frozen variance next to nothing, of a unit that was asleep until the freeze, would otherwise turn the first
    gradient after it into an update a million times the others', and with it the scale of its whole block.
    """
    for denominator in denominators:
        finite = torch.isfinite(denominator)
        mean = torch.where(finite, denominator, 0.0).sum() / finite.sum().clamp(min=1)
        denominator.clamp_(min=SMALLEST_OF_MEAN * mean)


def bound_updates(updates: Tensor, settings: AdamSettings, ranks: int) -> None:
    """Clamp one rank's m / (√v̂ + ε), in place, to ±√ranks · max(1, (1 - β₁) / √(1 - β₂)); infinity becomes NaN.

    That is the bound of an update where the variance follows every gradient (Kingma & Ba 2015, section 2.1); a rank's
    own gradient is noisier than the average by up to √ranks. With a variance that waits for its next update, or is
    frozen, nothing else stops gradients that grow by the very updates they cause.
    """
    bound = ranks**0.5 * max(1.0, (1 - settings.beta1) / (1 - settings.beta2) ** 0.5)
    zero_or_nan = updates - updates
    updates.clamp_(-bound, bound).add_(zero_or_nan)


def hold_masked(denominators: list[Tensor], mask: Tensor | None) -> None:
    """Make denominators infinite, in place, where a group's `exp_avg_mask` is zero: coordinates that stay."""
    if mask is not None:
        for denominator in denominators:
            denominator.masked_fill_(shaped_mask(mask, denominator.shape).to(denominator.device) == 0, float("inf"))


def shaped_mask(mask: Tensor, shape: torch.Size) -> Tensor:
    """`mask` in a parameter's shape: it broadcasts to it, or is flat, as DeepSpeed's is."""
    return mask.reshape(shape) if mask.numel() == shape.numel() else mask.expand(shape)


def variance_norm(variance: Tensor, settings: AdamSettings, step: int) -> Tensor:
    """The 1-norm of the bias-corrected variance, a float64 scalar, summed in float64."""
    return variance.sum(dtype=torch.float64) / (1 - settings.beta2**step)


def decay(weights: list[Tensor], settings: AdamSettings) -> None:
    """w ← (1 - lr λ) w, in place: decoupled weight decay, as in AdamW."""
    if settings.weight_decay:
        torch._foreach_mul_(weights, 1 - settings.lr * settings.weight_decay)


def _factors(settings: AdamSettings, step: int) -> AdamFactors:
    """Of the moments, and of √v̂ + ε, or √(v̂ + ε)."""
    inside = settings.eps_inside_sqrt
    correction = settings.second_correction(step)
    return AdamFactors(
        gain=1 - settings.beta1,
        beta2=settings.beta2,
        square_gain=1 - settings.beta2,
        correction=correction if inside else correction**0.5,
        eps=settings.eps,
        eps_inside_root=inside,
    )
