"""What `adam.adam_step` is called with: a record that refuses what does not fit together, so that no backend has to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["AdamFactors", "AdamStep"]


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
class AdamStep:
    """Arguments of `adam_step`; lists of one length."""

    kernel: ClassVar = "adam_step"

    factors: AdamFactors
    gradients: Sequence[Tensor] | None
    momenta: Sequence[Tensor] | None
    variances: Sequence[Tensor]
    weights: Sequence[Tensor] | None = None
    denominators: Sequence[Tensor] | None = None

    @property
    def lists(self) -> list[Sequence[Tensor]]:
        """Those that there are."""
        named = (self.gradients, self.momenta, self.variances, self.weights, self.denominators)
        return [tensors for tensors in named if tensors is not None]

    @property
    def written(self) -> list[Tensor]:
        """All tensors that a step changes."""
        tracked = [] if self.gradients is None else [*(self.momenta or ()), *self.variances]
        return [*tracked, *(self.weights or ()), *(self.denominators or ())]

    def only(self, places: Sequence[int]) -> AdamStep:
        """The same step of some of the tensors."""

        def those(tensors: Sequence[Tensor] | None) -> list[Tensor] | None:
            return None if tensors is None else [tensors[place] for place in places]

        variances = [self.variances[place] for place in places]
        moved, roots = those(self.weights), those(self.denominators)
        return AdamStep(self.factors, those(self.gradients), those(self.momenta), variances, moved, roots)

    def served(self) -> list[int]:
        """The places of what a kernel takes: contiguous fp32."""
        places = list(range(len(self.variances)))
        for tensors in self.lists:
            taken = [one.dtype is torch.float32 and one.is_contiguous() for one in tensors]
            places = places if all(taken) else [place for place in places if taken[place]]
        return places

    def check(self) -> None:
        """Raise ValueError unless the arguments fit together."""
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
