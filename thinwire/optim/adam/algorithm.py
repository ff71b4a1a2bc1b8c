"""1-bit Adam's arithmetic (Tang et al. 2021, arXiv 2102.02888): Adam until the freeze, momentum over a variance that
stays from then on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire.optim.algorithm import Agreement, Clock, Keep, Linear
from thinwire.optim.formulas import (
    AdamSettings,
    apply_updates,
    frozen_update,
    hold_masked,
    raise_smallest,
    to_denominators,
    warmup_step,
)
from thinwire.optim.linear_rules import MoveRule, PayloadRule
from thinwire.optim.members import Contribution, Members

__all__ = ["Adam", "Compressed"]

Compressed = Literal["update", "momentum"]


class Adam(Linear):
    """AdamW; once frozen `exp_avg` is what the ranks agreed on: m / (√v̂ + ε), or m with `compressed="momentum"`.

    `denominator` is √v̂ + ε, infinite at coordinates that stay.
    """

    state: ClassVar[Mapping[str, Keep]] = {"exp_avg": Keep.EVERY_RANK, "exp_avg_sq": Keep.OWNER}
    frozen_state: ClassVar[Mapping[str, str | None]] = {"exp_avg": "exp_avg", "denominator": "exp_avg_sq"}
    received_as: ClassVar[str | None] = "exp_avg"

    def __init__(self, compressed: Compressed) -> None:
        self._compressed = compressed
        divides = compressed == "update"
        self.payload_rule = PayloadRule("divided" if divides else "masked", "exp_avg", "denominator")
        self.move_rule = MoveRule("plain" if divides else "divided", "denominator")

    def payload(self, gradient: Tensor | None, own: Contribution, clock: Clock, out: Tensor) -> None:
        """m_i = β₁ m + (1 - β₁) g_i, divided by √v̂ + ε where updates are compressed."""
        momentum, beta1 = own.state["exp_avg"], own.settings.beta1
        if gradient is None:
            torch.mul(momentum, beta1, out=out)
            return
        if self._compressed == "update":
            gradient = torch.div(gradient, own.state["denominator"], out=out)
        torch.lerp(momentum, gradient, 1 - beta1, out=out)
        if self._compressed == "momentum":
            # A product and not a fill: an infinite gradient must become NaN, which every rank sees, and not 0.
            out.mul_(torch.isfinite(own.state["denominator"]))

    def absorb_exact(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """See Algorithm; `move` takes the averages into the moments, as it moves the weights, in one pass."""

    def absorb_compressed(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """See Algorithm; the momentum is there already."""

    def freeze(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """See Algorithm."""
        for members in groups:
            denominators = members["denominator"]
            to_denominators(denominators, members.settings, clock.steps)
            hold_masked(denominators, members.mask)
            if self._compressed == "update":
                raise_smallest(denominators)
                torch._foreach_div_(members["exp_avg"], denominators)

    def move(self, groups: Sequence[Members], clock: Clock) -> None:
        """See Algorithm."""
        for members in groups:
            weights, momenta, settings = members.weights, members["exp_avg"], members.settings
            if not clock.frozen:
                warmup_step(members.averages, weights, momenta, members["exp_avg_sq"], settings, clock.steps)
            elif self._compressed == "update":
                apply_updates(weights, momenta, settings, clock.steps)
            else:
                frozen_update(weights, momenta, members["denominator"], settings, clock.steps)

    def rates(self, parameter: int, settings: AdamSettings, clock: Clock) -> tuple[float, float]:
        """See Linear."""
        return settings.lr / settings.first_correction(clock.steps), 1 - settings.lr * settings.weight_decay

    def hold_masked(self, state: Mapping[str, Tensor], mask: Tensor) -> None:
        """See Algorithm."""
        if "denominator" in state:
            hold_masked([state["denominator"]], mask)

    def zero_variance(self, state: Mapping[str, Tensor]) -> Tensor | None:
        """See Algorithm."""
        return torch.isinf(state["denominator"]) if "denominator" in state else None
