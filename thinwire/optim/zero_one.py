"""0/1 Adam (Lu et al. 2022, arXiv 2202.06009, Algorithm 1): exact and compressed steps while the variance moves, one
bit an element almost from the start; then local steps, which send nothing, between syncs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from thinwire.optim.adam import Compressed, bound_updates, decay, frozen_update, track_variances
from thinwire.optim.algorithm import Agreement, Algorithm, Form, Keep, LocalSteps
from thinwire.optim.optimizer import CompressedOptimizer, FreezeOption
from thinwire.optim.options import HomeKeywords, Recipe, check_compress, check_count
from thinwire.optim.step import AdamSettings, Clock, Contribution, Members, Send
from thinwire.optim.storage import raise_smallest


@dataclass(frozen=True)
class ZeroOneSchedule:
    """The policies T_v and T_u of 0/1 Adam (Lu et al. 2022, arXiv 2202.06009).

    The variance is updated at steps divisible by an interval that begins at 1 and doubles every `var_update_scaler`
    updates. Once it is frozen, ranks meet at steps divisible by an interval that begins at 1, doubles every
    `local_step_scaler` steps, and stays at or below `local_step_clipper`.

    Raises ValueError where one of them is not a whole number of at least 1.
    """

    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_count(name, value)

    def variance_interval(self, updates: int) -> int:
        """Steps between two updates of the variance, after `updates` of them."""
        return 1 << (updates // self.var_update_scaler)

    def local_interval(self, frozen_steps: int) -> int:
        """Steps between two syncs, after `frozen_steps` steps with a frozen variance."""
        doublings = min(frozen_steps // self.local_step_scaler, self.local_step_clipper.bit_length())
        return min(1 << doublings, self.local_step_clipper)

    def send(self, step: int, variance_updates: int, frozen_at: int | None) -> Send:
        """What step `step`, from 1 on, sends; `frozen_at` is the last step before the variance was frozen."""
        if frozen_at is None:
            exact = step % self.variance_interval(variance_updates) == 0
            return Send.EXACT if exact else Send.COMPRESSED
        sync = step % self.local_interval(step - 1 - frozen_at) == 0
        return Send.SYNC if sync else Send.LOCAL


class ZeroOne(LocalSteps, Algorithm):
    """Adam whose variance is updated now and then, and stays from the freeze on.

    `denominator` is √v̂ + ε at the last update of the variance, infinite where coordinates stay. What is compressed is
    m / (√v̂ + ε), or with `compressed="momentum"` gradients while the variance moves, and m later. Once frozen `exp_avg`
    is what is compressed, this rank's own between syncs, and `mean_momentum` its average, weighted by learning rate,
    over the local steps since the last sync. A parameter then shows the weight of the last sync less Σγ times that
    mean: in the paper's words u = -Σγ · mean. Keeping the mean and Σγ apart makes residuals momenta, which a learning
    rate that has changed since does not rescale.
    """

    form = Form("exp_avg", "denominator", payload=None, update=None)
    state: Mapping[str, Keep] = {
        "exp_avg": Keep.EVERY_RANK,
        "exp_avg_sq": Keep.OWNER,
        "denominator": Keep.EVERY_RANK,
    }
    frozen_state: ClassVar[Mapping[str, str | None]] = {
        "exp_avg": "exp_avg",
        "denominator": "denominator",
        "mean_momentum": None,
    }
    own_state = frozenset({"exp_avg", "mean_momentum"})
    published = ("denominator",)

    def __init__(self, compressed: Compressed, schedule: ZeroOneSchedule) -> None:
        self._compressed = compressed
        self._schedule = schedule
        self._variance_updates = 0
        self._distances: dict[int, float] = {}  # Σγ since the last sync, by group
        self._shares: dict[int, float] = {}  # by group: the weight of the step in flight in the mean momentum

    @override
    def next_send(self, clock: Clock) -> Send:
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
            _, share = self._advanced(own.group, own.settings, clock.steps + 1)
            torch.lerp(own.state["mean_momentum"], out, share, out=out)

    @override
    def payload_settings(self, settings: AdamSettings, clock: Clock) -> AdamSettings | None:
        """In a sync the learning rate weighs the payload."""
        return settings if clock.frozen and self.next_send(clock) is Send.SYNC else None

    # The variance moves

    @override
    def absorb_owned(self, groups: Sequence[Members], clock: Clock) -> None:
        self._variance_updates += 1
        for members in groups:
            variances, denominators, settings = members["exp_avg_sq"], members["denominator"], members.settings
            track_variances(members.averages, variances, settings, denominators, self._variance_updates)

    @override
    def exact(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        for members in groups:
            torch._foreach_lerp_(members["exp_avg"], members.averages, 1 - members.settings.beta1)

    @override
    def settle(self, groups: Sequence[Members], clock: Clock) -> None:
        for members in groups:
            if self._compressed == "update":
                raise_smallest(members["denominator"])

    @override
    def compressed(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
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

    @override
    def freeze(
        self, groups: Sequence[Members], clock: Clock, agree: Agreement, precondition: Callable[[], None]
    ) -> None:
        """The variance goes, the denominators are what they were."""
        for members in groups:
            momenta, denominators = members["exp_avg"], members["denominator"]
            if self._compressed == "update":
                for momentum, denominator in zip(momenta, denominators, strict=True):
                    momentum.div_(denominator)
            for momentum, denominator in zip(momenta, denominators, strict=True):
                momentum.masked_fill_(torch.isinf(denominator), 0.0)

    @override
    def move(self, groups: Sequence[Members], clock: Clock) -> None:
        for members in groups:
            if clock.frozen:
                decay(members.weights, members.settings)
            else:
                frozen_update(members, clock.steps)
        if clock.frozen:
            self.move_synced(groups, clock)

    # Local steps

    @override
    def count_local(self, settings: Mapping[int, AdamSettings], clock: Clock) -> None:
        for group, of_group in settings.items():
            self._distances[group], self._shares[group] = self._advanced(group, of_group, clock.steps)

    def _advanced(self, group: int, settings: AdamSettings, step: int) -> tuple[float, float]:
        """Σγ of a group after step `step`, with γₜ = lr / (1 - β₁ᵗ), and the weight of that step in the mean since the
        last sync; 1 if nothing has moved, whatever the learning rate.

        A weight decay that has struck since shrinks what an earlier step counts, as it shrinks how far that step moved
        the weights.
        """
        moved = settings.lr / settings.first_correction(step)
        distance = (1 - settings.lr * settings.weight_decay) * self._distances.get(group, 0.0) + moved
        return distance, moved / distance if distance else 1.0

    @override
    def absorb_local(self, groups: Sequence[Members], clock: Clock, finite: bool) -> None:
        for members in groups:
            share = self._shares[members.group]
            if finite:
                torch._foreach_copy_(members["exp_avg"], members.averages)
                torch._foreach_lerp_(members["mean_momentum"], members["exp_avg"], share)
            else:
                torch._foreach_mul_(members["mean_momentum"], 1 - share)

    @override
    def decay_common(self, groups: Sequence[Members], clock: Clock) -> None:
        for members in groups:
            decay(members.weights, members.settings)

    @override
    def own_weight(self, common: Tensor, own: Contribution) -> Tensor:
        """The weight of the last sync less Σγ · mean, over √v̂ + ε where momenta are compressed."""
        moved = own.state["mean_momentum"] * -self._distances.get(own.group, 0.0)
        if self._compressed == "momentum":
            moved.div_(own.state["denominator"])
        return moved.add_(common)

    @override
    def sync_payload(self, own: Contribution, out: Tensor) -> None:
        out.copy_(own.state["mean_momentum"])

    @override
    def move_synced(self, groups: Sequence[Members], clock: Clock) -> None:
        for members in groups:
            distance = self._distances.get(members.group, 0.0)
            if self._compressed == "update":
                torch._foreach_add_(members.weights, members["exp_avg"], alpha=-distance)
            else:
                torch._foreach_addcdiv_(members.weights, members["exp_avg"], members["denominator"], -distance)

    @override
    def end_sync(self) -> None:
        self._distances = {}

    @property
    @override
    def in_sync(self) -> bool:
        return not any(self._distances.values())

    # What else a home asks

    @override
    def decision(self) -> object:
        return self._schedule.variance_interval(self._variance_updates)

    @override
    def scalars(self, names: Sequence[str]) -> dict[str, Any]:
        progress = {str(group): distance for group, distance in self._distances.items()}
        return {"variance_updates": self._variance_updates, "progress": progress}

    @override
    def load_scalars(self, saved: Mapping[str, Any], names: Sequence[str]) -> None:
        self._variance_updates = saved["variance_updates"]
        self._distances = {int(group): distance for group, distance in saved["progress"].items()}


class ZeroOneAdam(CompressedOptimizer):
    """Adam that sends one bit an element or nothing: 0/1 Adam (Lu et al. 2022, arXiv 2202.06009, Algorithm 1).

    Synchronises by itself as OneBitAdam does, with the same calls, groups and checkpoints. Until `var_freeze_step`,
    steps divisible by the variance interval average gradients exactly, and update momentum and variance; the others
    average them through `codec`, with error feedback, and leave the variance alone. Then the variance is frozen,
    residuals start from zero, and ranks take local steps of Adam without any communication. At steps divisible by the
    local interval they meet: the average momentum since the last sync, weighted by learning rate, goes through `codec`,
    and every rank moves by it from the weights of the last sync. After a sync the weights are the same bits on every
    rank; between two they differ: see `in_sync`, `synchronize_weights`, `eval`.

    With `stage=1` variance, master weights and owners' residuals are sharded, and denominators published by their
    owners; every worker keeps what its own steps need. Bytes an element on N ranks, beside gradients: fp32 parameters
    16 + 8/N until the variance is frozen, 24 + 4/N afterwards; 16-bit ones 10 + 12/N and 16 + 8/N. At stage 0, beside
    OneBitAdam's: 4 for the denominators and 8 for residuals from the start; once frozen 4 for the mean, 4 for fp32
    parameters' master weights.

    Args:
        params, lr, betas, eps, weight_decay, bias_correction, eps_inside_sqrt, amsgrad: as in OneBitAdam.
            `exp_avg_mask` in a group holds from the first step on. The bias correction of the variance counts its
            updates.
        var_freeze_step: steps before the variance is frozen.
        var_update_scaler: updates of the variance after which their interval doubles, beginning at 1.
        local_step_scaler: steps with a frozen variance after which the local interval doubles, beginning at 1.
        local_step_clipper: the longest local interval; 1 for no local steps.
        compress: what is compressed: "update", momenta divided by √v̂ + ε, with denominators of at least a hundredth of
            their parameter's mean, and clamped to ±√ranks · max(1, (1 - β₁) / √(1 - β₂)), Adam's own bound for a rank;
            or as in the paper, at stage 0, "momentum", gradients while the variance moves, then momenta.
        options: stage 0 or 1, and the others of `HomeOptions`.

    A coordinate stays where it is (decay aside) until an exact step brings it a variance. A parameter without a
    gradient on any rank is left alone in an exact step; in others its gradient counts as zero, and in a local step no
    rank can know of the others'. A step in which any rank's gradient is not finite is skipped on all of them; in a
    local step that rank alone adds nothing, see `left_out_steps`.
    """

    var_freeze_step = FreezeOption()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        eps_inside_sqrt: bool = False,
        amsgrad: bool = False,
        compress: Compressed = "update",
        **options: Unpack[HomeKeywords],
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt}
        intervals = {
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }

        def check() -> None:
            check_compress(amsgrad, compress, options.get("stage", 0))
            ZeroOneSchedule(**intervals)

        recipe = Recipe(
            algorithm=lambda: ZeroOne(compress, ZeroOneSchedule(**intervals)),
            settings={"compress": compress},
            schedule=intervals,
            freeze_step=var_freeze_step,
            freeze_option="var_freeze_step",
            stages=(0, 1),
            check=check,
        )
        super().__init__(params, defaults, recipe, options)

    @property
    def left_out_steps(self) -> int:
        """Local steps to which this rank added nothing, as its gradient was not finite."""
        return self._home.left_out_steps
