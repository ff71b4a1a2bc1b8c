"""Adam's arithmetic on lists of tensors, before and after the variance is frozen: the one place where
the formulas stand. Multi-tensor operations throughout, so that a GPU gets few launches; where several follow one
another on a CPU they go over as many elements at a time as its caches hold (`in_cache`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.in_cache import in_cache

__all__ = [
    "SMALLEST_OF_MEAN",
    "AdamSettings",
    "apply_updates",
    "bound_updates",
    "decay",
    "frozen_update",
    "hold_masked",
    "raise_smallest",
    "root",
    "shaped_mask",
    "to_denominators",
    "track_moments",
    "track_variances",
    "variance_norm",
    "warmup_update",
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


def warmup_update(
    weights: list[Tensor], momenta: list[Tensor], variances: list[Tensor], settings: AdamSettings, step: int
) -> None:
    """w -= lr · m̂ / (√v̂ + ε) in place, after `track_moments`: with the default settings the two together give the
    bits of torch.optim.AdamW(foreach=True)."""
    rate = settings.lr / settings.first_correction(step)
    for some_weights, some_momenta, some_variances in in_cache(weights, momenta, variances):
        decay(some_weights, settings)
        denominators = [variance.clone() for variance in some_variances]
        root(denominators, settings, step)
        torch._foreach_addcdiv_(some_weights, some_momenta, denominators, -rate)


def track_moments(
    gradients: list[Tensor], momenta: list[Tensor], variances: list[Tensor], settings: AdamSettings
) -> None:
    """m ← β₁ m + (1 - β₁) g and v ← β₂ v + (1 - β₂) g², in place."""
    for some_gradients, some_momenta, some_variances in in_cache(gradients, momenta, variances):
        torch._foreach_lerp_(some_momenta, some_gradients, 1 - settings.beta1)
        track_variances(some_gradients, some_variances, settings)


def track_variances(gradients: list[Tensor], variances: list[Tensor], settings: AdamSettings) -> None:
    """v ← β₂ v + (1 - β₂) g², in place."""
    torch._foreach_mul_(variances, settings.beta2)
    torch._foreach_addcmul_(variances, gradients, gradients, 1 - settings.beta2)


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
    zero_variance = [variance == 0 for variance in variances]
    root(variances, settings, step)
    for denominator, mask in zip(variances, zero_variance, strict=True):
        denominator.masked_fill_(mask, float("inf"))


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


def root(variances: list[Tensor], settings: AdamSettings, step: int) -> None:
    """Turn v, in place, into √v̂ + ε, or √(v̂ + ε)."""
    if settings.eps_inside_sqrt:
        torch._foreach_div_(variances, settings.second_correction(step))
        torch._foreach_add_(variances, settings.eps)
        torch._foreach_sqrt_(variances)
    else:
        torch._foreach_sqrt_(variances)
        torch._foreach_div_(variances, settings.second_correction(step) ** 0.5)
        torch._foreach_add_(variances, settings.eps)
