"""0/1 Adam's arithmetic (Lu et al. 2022, arXiv 2202.06009, Algorithm 1): exact and compressed steps while the variance
moves, then local steps between syncs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.optim.adam.algorithm import Compressed
from thinwire.optim.algorithm import Agreement, Algorithm, Clock, Keep, Send
from thinwire.optim.formulas import (
    AdamSettings,
    bound_updates,
    decay,
    frozen_update,
    hold_masked,
    raise_smallest,
    track_variances,
)
from thinwire.optim.members import Contribution, Members
from thinwire.optim.zero_one.local_progress import LocalProgress
from thinwire.optim.zero_one.schedule import ZeroOneSchedule

__all__ = ["ZeroOne"]


class ZeroOne(Algorithm):
    """Adam whose variance is updated now and then, and stays from the freeze on.

    `denominator` is √v̂ + ε at the last update of the variance, infinite where coordinates stay. What is compressed is
    m / (√v̂ + ε), or with `compressed="momentum"` gradients while the variance moves, and m later. Once frozen `exp_avg`
    is what is compressed, this rank's own between syncs, and `mean_momentum` its average, weighted by learning rate,
    over the local steps since the last sync. A parameter then shows the weight of the last sync less Σγ times that
    mean: in the paper's words u = -Σγ · mean. Keeping the mean and Σγ apart makes residuals momenta, which a learning
    rate that has changed since does not rescale.
    """

    state: ClassVar[Mapping[str, Keep]] = {
        "exp_avg": Keep.EVERY_RANK,
        "exp_avg_sq": Keep.OWNER,
        "denominator": Keep.EVERY_RANK,
    }
    fills: ClassVar[Mapping[str, float]] = {"denominator": float("inf")}
    frozen_state: ClassVar[Mapping[str, str | None]] = {
        "exp_avg": "exp_avg",
        "denominator": "denominator",
        "mean_momentum": None,
    }
    own_state = frozenset({"exp_avg", "mean_momentum"})
    published = ("denominator",)
    local_steps = True

    def __init__(self, compressed: Compressed, schedule: ZeroOneSchedule) -> None:
        self._compressed = compressed
        self._schedule = schedule
        self._variance_updates = 0
        self._progress = LocalProgress()
        self._shares: dict[int, float] = {}  # by group: the weight of the step under way in the mean momentum

    def next_send(self, clock: Clock) -> Send:
        """See Algorithm."""
        return self._schedule.send(clock.steps + 1, self._variance_updates, clock.frozen_at)

    # What a rank contributes

    def payload(self, gradient: Tensor | None, own: Contribution, clock: Clock, out: Tensor) -> None:
        """The gradient; in a compressed step where updates are compressed, the new momentum divided by √v̂ + ε. Once
        the variance is frozen the new momentum, and in a sync its average with those of the local steps before."""
        momentum, denominator = own.state["exp_avg"], own.state["denominator"]
        beta1, divides = own.settings.beta1, self._compressed == "update"
        if clock.frozen and gradient is None:
            torch.mul(momentum, beta1, out=out)
        elif clock.frozen:
            assert gradient is not None
            new = torch.div(gradient, denominator, out=out) if divides else gradient
            torch.lerp(momentum, new, 1 - beta1, out=out)
        else:
            out.zero_() if gradient is None else out.copy_(gradient)
            if divides:
                torch.lerp(momentum, out, 1 - beta1, out=out).div_(denominator)
        if divides:
            bound_updates(out, own.settings, own.ranks)
        else:
            out.mul_(torch.isfinite(denominator))
        if clock.frozen and self.next_send(clock) is Send.SYNC:
            share = self._progress.share(own.group, own.settings, clock.steps + 1)
            torch.lerp(own.state["mean_momentum"], out, share, out=out)

    def payload_settings(self, settings: AdamSettings, clock: Clock) -> AdamSettings | None:
        """See Algorithm: in a sync the learning rate weighs the payload."""
        return settings if clock.frozen and self.next_send(clock) is Send.SYNC else None

    # The variance moves

    def absorb_owned(self, groups: Sequence[Members], clock: Clock) -> None:
        """See Algorithm."""
        self._variance_updates += 1
        for members in groups:
            variances, denominators, settings = members["exp_avg_sq"], members["denominator"], members.settings
            track_variances(members.averages, variances, settings, denominators, self._variance_updates)

    def absorb_exact(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """See Algorithm."""
        for members in groups:
            torch._foreach_lerp_(members["exp_avg"], members.averages, 1 - members.settings.beta1)

    def settle(self, groups: Sequence[Members], clock: Clock) -> None:
        """See Algorithm."""
        for members in groups:
            hold_masked(members["denominator"], members.mask)
            if self._compressed == "update":
                raise_smallest(members["denominator"])

    def absorb_compressed(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """See Algorithm."""
        for members in groups:
            averages, momenta, denominators = members.averages, members["exp_avg"], members["denominator"]
            if not clock.frozen and self._compressed == "update":
                torch._foreach_mul_(averages, denominators)
            for average, denominator in zip(averages, denominators, strict=True):
                average.masked_fill_(torch.isinf(denominator), 0.0)
            if clock.frozen:
                torch._foreach_zero_(members["mean_momentum"])
            if clock.frozen or self._compressed == "update":
                torch._foreach_copy_(momenta, averages)
            else:
                torch._foreach_lerp_(momenta, averages, 1 - members.settings.beta1)

    def freeze(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """See Algorithm; the variance goes, the denominators are what they were."""
        for members in groups:
            momenta, denominators = members["exp_avg"], members["denominator"]
            if self._compressed == "update":
                for momentum, denominator in zip(momenta, denominators, strict=True):
                    momentum.div_(denominator)
            for momentum, denominator in zip(momenta, denominators, strict=True):
                momentum.masked_fill_(torch.isinf(denominator), 0.0)

    def move(self, groups: Sequence[Members], clock: Clock) -> None:
        """See Algorithm."""
        for members in groups:
            if clock.frozen:
                decay(members.weights, members.settings)
            else:
                frozen_update(
                    members.weights, members["exp_avg"], members["denominator"], members.settings, clock.steps
                )
        if clock.frozen:
            self.meet(groups, clock)

    # Local steps

    def count_local(self, settings: Mapping[int, AdamSettings], clock: Clock) -> None:
        """See Algorithm."""
        for group, of_group in settings.items():
            self._shares[group] = self._progress.share(group, of_group, clock.steps)
            self._progress.advance(group, of_group, clock.steps)

    def absorb_local(self, groups: Sequence[Members], clock: Clock, finite: bool) -> None:
        """See Algorithm."""
        for members in groups:
            share = self._shares[members.group]
            if finite:
                torch._foreach_copy_(members["exp_avg"], members.averages)
                torch._foreach_lerp_(members["mean_momentum"], members["exp_avg"], share)
            else:
                torch._foreach_mul_(members["mean_momentum"], 1 - share)

    def decay_common(self, groups: Sequence[Members], clock: Clock) -> None:
        """See Algorithm."""
        for members in groups:
            decay(members.weights, members.settings)

    def own_weight(self, common: Tensor, own: Contribution) -> Tensor:
        """See Algorithm: the weight of the last sync less Σγ · mean, over √v̂ + ε where momenta are compressed."""
        moved = own.state["mean_momentum"] * -self._progress.distance(own.group)
        if self._compressed == "momentum":
            moved.div_(own.state["denominator"])
        return moved.add_(common)

    def begin_meeting(self, own: Contribution, out: Tensor) -> None:
        """See Algorithm."""
        out.copy_(own.state["mean_momentum"])

    def meet(self, groups: Sequence[Members], clock: Clock) -> None:
        """See Algorithm."""
        for members in groups:
            distance = self._progress.distance(members.group)
            if self._compressed == "update":
                torch._foreach_add_(members.weights, members["exp_avg"], alpha=-distance)
            else:
                torch._foreach_addcdiv_(members.weights, members["exp_avg"], members["denominator"], -distance)

    def end_sync(self) -> None:
        """See Algorithm."""
        self._progress.reset()

    @property
    def in_sync(self) -> bool:
        """See Algorithm."""
        return not self._progress

    # What else a home asks

    def hold_masked(self, state: Mapping[str, Tensor], mask: Tensor) -> None:
        """See Algorithm."""
        hold_masked([state["denominator"]], mask)

    def zero_variance(self, state: Mapping[str, Tensor]) -> Tensor | None:
        """See Algorithm."""
        return torch.isinf(state["denominator"])

    def decision(self) -> object:
        """See Algorithm."""
        return self._schedule.variance_interval(self._variance_updates)

    def scalars(self, names: Sequence[str]) -> dict[str, Any]:
        """See Algorithm."""
        progress = {str(group): distance for group, distance in self._progress.state().items()}
        return {"variance_updates": self._variance_updates, "progress": progress}

    def load_scalars(self, saved: Mapping[str, Any], names: Sequence[str]) -> None:
        """See Algorithm."""
        self._variance_updates = saved["variance_updates"]
        self._progress.load(saved["progress"])
