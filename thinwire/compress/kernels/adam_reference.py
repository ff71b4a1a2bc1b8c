"""A step of Adam in plain torch: slow, readable, on any device, in any dtype. This file is the specification.

Each operation is rounded by itself, to the nearest; so every element has the same bits wherever it lies, and on every
processor. That takes what torch has in one operation apart: torch.lerp multiplies and adds with one rounding where the
processor can, addcdiv_ divides first on a GPU, and torch.sqrt is up to one unit in the last place off on some CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.compress.kernels.adam_calls import AdamFactors, AdamStep

__all__ = ["adam_step"]


def adam_step(call: AdamStep) -> None:
    """See `thinwire.compress.kernels.adam.adam_step`."""
    if not call.variances:
        return
    factors, variances = call.factors, list(call.variances)
    momenta = None if call.momenta is None else list(call.momenta)
    if call.gradients is not None:
        gradients = list(call.gradients)
        if momenta is not None:
            _track_momenta(gradients, momenta, factors.gain)
        squares = list(torch._foreach_mul(gradients, factors.square_gain))
        torch._foreach_mul_(squares, gradients)
        torch._foreach_mul_(variances, factors.beta2)
        torch._foreach_add_(variances, squares)
    if call.denominators is not None:
        _copy_all(call.denominators, _denominators(variances, factors))
    if call.weights is not None:
        assert momenta is not None
        weights, updates = list(call.weights), list(torch._foreach_mul(momenta, -factors.rate))
        torch._foreach_div_(updates, _denominators(variances, factors))
        torch._foreach_mul_(weights, factors.decay)
        torch._foreach_add_(weights, updates)


def _track_momenta(gradients: list[Tensor], momenta: list[Tensor], gain: float) -> None:
    """m + gain · (g - m), or beyond a half g - (1 - gain) · (g - m), which is g where gain is 1."""
    rounded = torch.tensor(gain, dtype=momenta[0].dtype)
    changes = list(torch._foreach_sub(gradients, momenta))
    if rounded < 0.5:
        torch._foreach_mul_(changes, gain)
        torch._foreach_add_(momenta, changes)
    else:
        torch._foreach_mul_(changes, float(1 - rounded))
        _copy_all(momenta, torch._foreach_sub(gradients, changes))


def _denominators(variances: list[Tensor], factors: AdamFactors) -> list[Tensor]:
    """√v / correction + eps, or √(v / correction + eps)."""
    if factors.eps_inside_root:
        shifted = list(torch._foreach_div(variances, factors.correction))
        torch._foreach_add_(shifted, factors.eps)
        found = _roots(shifted)
    else:
        found = _roots(variances)
        torch._foreach_div_(found, factors.correction)
        torch._foreach_add_(found, factors.eps)
    for denominator, variance in zip(found, variances, strict=True) if factors.holds_zero else ():
        denominator.masked_fill_(variance == 0, torch.inf)
    return found


def _roots(variances: Sequence[Tensor]) -> list[Tensor]:
    """Found in float64: its root, rounded to float32, is float32's root, rounded once."""
    wide = [torch.empty_like(one, dtype=torch.float64) for one in variances]
    _copy_all(wide, variances)
    torch._foreach_sqrt_(wide)
    roots = [torch.empty_like(one) for one in variances]
    _copy_all(roots, wide)
    return roots


def _copy_all(outputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(outputs), list(values))
