"""Adam's step on lists of tensors, in one pass over memory: the moments, what they divide by, and the weights.

What no kernel takes, tensors that are not contiguous or not fp32, plain torch does, with the same bits:
`plain_adam_step` is the specification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from thinwire.compress.kernels.buckets import KernelCall


@dataclass(frozen=True)
class AdamFactors:
    """The numbers of a step, each rounded to the tensors' dtype where it is used.

    gain: 1 - β₁. beta2, square_gain: β₂ and 1 - β₂. correction: what √v is divided by, or v with `eps_inside_root`.
    holds_zero: whether denominators are infinite where v is 0. decay, rate: of the weights.
    """

    gain: float
    beta2: float
    square_gain: float
    correction: float = 1.0
    eps: float = 0.0
    eps_inside_root: bool = False
    holds_zero: bool = False
    decay: float = 1.0
    rate: float = 0.0

    @property
    def from_momentum(self) -> bool:
        """Whether m grows towards g, or else is g less a rest, as torch.lerp has it: by the side that is nearer."""
        return bool(np.float32(self.gain) < 0.5)

    @property
    def weight(self) -> np.float32:
        """Of g - m, in what is added to m or to g."""
        gain = np.float32(self.gain)
        return gain if self.from_momentum else -(np.float32(1.0) - gain)

    @property
    def others(self) -> tuple[float, ...]:
        """What kernels are given besides, in order."""
        return self.beta2, self.square_gain, self.correction, self.eps, self.decay, -self.rate


@dataclass(eq=False)
class AdamStep(KernelCall):
    """Do, in place, what of these there are tensors for, element by element, each operation rounded by itself:

        m = m + gain · (g - m)                     gradients and momenta; for gain ≥ ½: g - (1 - gain) · (g - m)
        v = beta2 · v + (square_gain · g) · g      gradients
        d = √v / correction + eps                  or √(v / correction + eps) with `eps_inside_root`
        d = ∞ where v = 0                          with `holds_zero`
        w = decay · w + (-rate · m) / d            weights, or else d is written to the denominators

    Weights are moved with gradients and momenta; without gradients denominators are all that is written.

    Lists of one length, or None; tensors at one place have as many elements and one device. Denominators may be the
    gradients or the variances themselves; nothing else may share memory. Equal elements get equal bits, wherever they
    lie, on every device.
    """

    kernel = "adam_step"

    factors: AdamFactors
    gradients: Sequence[Tensor] | None = None
    momenta: Sequence[Tensor] | None = None
    variances: Sequence[Tensor] = ()
    weights: Sequence[Tensor] | None = None
    denominators: Sequence[Tensor] | None = None

    @property
    def lists(self) -> list[Sequence[Tensor]]:
        """Those that there are."""
        named = (self.gradients, self.momenta, self.variances, self.weights, self.denominators)
        return [tensors for tensors in named if tensors is not None]

    @property
    @override
    def device(self) -> torch.device:
        return self.variances[0].device

    @property
    def written(self) -> list[Tensor]:
        """All tensors that a step changes."""
        tracked = [] if self.gradients is None else [*(self.momenta or ()), *self.variances]
        return [*tracked, *(self.weights or ()), *(self.denominators or ())]

    def only(self, places: Sequence[int]) -> AdamStep:
        """The same step of some of the tensors."""
        given = {name: tensors for name, tensors in vars(self).items() if name != "factors" and tensors is not None}
        return AdamStep(self.factors, **{name: [some[place] for place in places] for name, some in given.items()})

    def served(self) -> list[int]:
        """The places of what a kernel takes: contiguous fp32."""
        places = list(range(len(self.variances)))
        for tensors in self.lists:
            taken = [one.dtype is torch.float32 and one.is_contiguous() for one in tensors]
            places = places if all(taken) else [place for place in places if taken[place]]
        return places

    @override
    def check(self) -> None:
        if self.weights is not None and self.denominators is not None:
            raise ValueError("a step moves weights or writes denominators: give one of the two")
        if self.weights is not None and (self.momenta is None or self.gradients is None):
            raise ValueError("weights are moved by momenta that follow gradients: give those, too")
        if self.gradients is None and (self.momenta is not None or self.denominators is None):
            raise ValueError("without gradients denominators are all that a step writes: give those, and no momenta")
        numels = [one.numel() for one in self.variances]
        device = self.variances[0].device if self.variances else None
        for tensors in self.lists:
            if [one.numel() for one in tensors] != numels:
                raise ValueError(
                    f"lists of {[one.numel() for one in tensors]} elements beside variances of {numels}: give tensors "
                    "alike in number and size"
                )
            if any(one.device != device for one in tensors):
                raise ValueError(
                    f"tensors on {sorted({str(one.device) for one in tensors} | {str(device)})}: use one device"
                )


def plain_adam_step(call: AdamStep) -> None:
    """Do the step in plain torch: slow, readable, on any device, in any dtype.

    Each operation is rounded by itself, to the nearest; so every element has the same bits wherever it lies, and on
    every processor. That takes what torch has in one operation apart: torch.lerp multiplies and adds with one rounding
    where the processor can, addcdiv_ divides first on a GPU, and torch.sqrt is up to one unit in the last place off on
    some CPUs.
    """
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
