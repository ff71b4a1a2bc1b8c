"""The warmup of sharded 1-bit LAMB: what a rank can do of LAMB with its shard alone, and the norms of layers that it
cannot, as sums to add up over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.optim import options as agreement
from thinwire.optim.formulas import root, track_moments
from thinwire.optim.lamb.formulas import LambSettings, check_lamb_options
from thinwire.zero.master_weights import BucketMasters

__all__ = ["LambMasters", "LambMoments", "square_norms"]


class LambMoments(torch.optim.Optimizer):
    """LAMB up to its trust ratio, which is elementwise: `step` turns gradients into updates and moves nothing.

    Options are those of OneBitLamb. State is AdamW's: `step`, `exp_avg`, `exp_avg_sq`; but all parameters have one step
    count, `begin_step`'s, whether they have a gradient in every step or not. Raises ValueError for options that cannot
    work.
    """

    def __init__(self, params: ParamsT, **options: Any) -> None:
        agreement.check_group(options)
        check_lamb_options(options)
        super().__init__(params, options)
        self._count = 0

    def begin_step(self, number: int) -> None:
        """Step number `number`, from 1 on, comes next, or goes by without a gradient."""
        self._count = number
        for state in self.state.values():
            if state:  # looking for a state that is not there yet leaves an empty one
                state["step"].fill_(number)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Replace every `.grad` by m̂ / (√v̂ + ε) + λw, in place."""
        assert closure is None
        for group in self.param_groups:
            present = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in present:
                if not self.state[parameter]:
                    self.state[parameter] = {
                        "step": torch.tensor(float(self._count)),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
            if present:
                self._to_updates(present, LambSettings.of_group(group))

    def _to_updates(self, parameters: list[Tensor], settings: LambSettings) -> None:
        gradients: list[Tensor] = []
        for parameter in parameters:
            assert parameter.grad is not None
            gradients.append(parameter.grad)
        momenta = [self.state[parameter]["exp_avg"] for parameter in parameters]
        variances = [self.state[parameter]["exp_avg_sq"] for parameter in parameters]
        track_moments(gradients, momenta, variances, settings)
        torch._foreach_copy_(gradients, variances)
        root(gradients, settings, self._count)
        torch._foreach_reciprocal_(gradients)
        torch._foreach_mul_(gradients, momenta)
        torch._foreach_div_(gradients, settings.first_correction(self._count))
        if settings.weight_decay:
            torch._foreach_add_(gradients, parameters, alpha=settings.weight_decay)


class LambMasters(BucketMasters):
    """BucketMasters whose optimizer is LambMoments: weights move in a second step, by a coefficient a layer."""

    def begin_step(self, number: int) -> None:
        """See LambMoments."""
        if self.optimizer is not None:
            assert isinstance(self.optimizer, LambMoments)
            self.optimizer.begin_step(number)

    def find_updates(self, average: Tensor, coefficient: float, absent: frozenset[int]) -> None:
        """Take the gradients in, as BucketMasters.step does; the updates stay in their memory until `move`."""
        if self.optimizer is not None:
            self._run_optimizer(average, coefficient, absent)

    def measure(self, squares: Tensor) -> None:
        """Add ‖w‖² and ‖update‖² of the own shard's part of each parameter to `squares`, fp64 [parameters, 2]."""
        numbers, weights, updates = [], [], []
        for number, cut in self.own_cuts():
            if (update := self.parts[number].grad) is not None:
                numbers.append(self.runs[number].parameter)
                weights.append(self.parts[number][cut])
                updates.append(update[cut])
        if numbers:
            squares[numbers] += torch.stack([square_norms(weights), square_norms(updates)], 1).to(squares.device)

    def move(self, rates: Callable[[int], float]) -> None:
        """w -= rate · update; `rates` gives a parameter's, its layer's coefficient included."""
        moving = [
            (rates(run.parameter), part, part.grad)
            for run, part in zip(self.runs, self.parts, strict=True)
            if part.grad is not None
        ]
        if moving:
            factors, parts, updates = zip(*moving, strict=True)
            torch._foreach_mul_(updates, [-factor for factor in factors])
            torch._foreach_add_(parts, updates)
        for part in self.parts:
            part.grad = None


def square_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The squares of the 2-norms: fp64 [tensors]."""
    return torch.stack(torch._foreach_norm(list(tensors))).double().square()
