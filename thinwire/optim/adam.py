"""1-bit Adam (Tang et al. 2021, arXiv 2102.02888): Adam until the freeze, momentum over a variance that stays from then
on, one bit an element; and its class, a drop-in torch optimizer that synchronises by itself, during backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from thinwire.compress.kernels.adam import AdamFactors, AdamStep
from thinwire.compress.kernels.loading import execute_adam_step
from thinwire.optim.algorithm import Agreement, Algorithm, Form, Keep
from thinwire.optim.optimizer import CompressedOptimizer, FreezeOption
from thinwire.optim.options import HomeKeywords, Recipe, check_compress
from thinwire.optim.step import AdamSettings, Clock, Members

Compressed = Literal["update", "momentum"]


def warmup_step(members: Members, step: int) -> None:
    """AdamW, in place: m ← β₁ m + (1 - β₁) g, v ← β₂ v + (1 - β₂) g², w -= lr · m̂ / (√v̂ + ε)."""
    settings, gradients = members.settings, members.averages
    factors = replace(
        _factors(settings, step),
        decay=1 - settings.lr * settings.weight_decay,
        rate=settings.lr / settings.first_correction(step),
    )
    momenta, variances = members["exp_avg"], members["exp_avg_sq"]
    execute_adam_step(
        AdamStep(factors, gradients=gradients, momenta=momenta, variances=variances, weights=members.weights)
    )


def track_moments(members: Members, step: int) -> None:
    """m and v of `warmup_step`, in place, and √v̂ + ε in the place of the gradients."""
    factors, gradients = _factors(members.settings, step), members.averages
    momenta, variances = members["exp_avg"], members["exp_avg_sq"]
    execute_adam_step(
        AdamStep(factors, gradients=gradients, momenta=momenta, variances=variances, denominators=gradients)
    )


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
    execute_adam_step(
        AdamStep(factors, gradients=gradients, momenta=None, variances=variances, denominators=denominators)
    )


def frozen_update(members: Members, step: int) -> None:
    """w -= lr · m̂ / (√v + ε) in place, with v frozen; weight decay is decoupled, as in AdamW."""
    decay(members.weights, members.settings)
    rate = members.settings.lr / members.settings.first_correction(step)
    torch._foreach_addcdiv_(members.weights, members["exp_avg"], members["denominator"], -rate)


def to_denominators(variances: list[Tensor], settings: AdamSettings, step: int) -> None:
    """Turn v, in place, into what the frozen stage divides by: √v̂ + ε, and infinity where v is 0.

    A coordinate whose gradient was always 0 would otherwise move by ± scale / ε at every step.
    """
    factors = replace(_factors(settings, step), holds_zero=True)
    execute_adam_step(AdamStep(factors, gradients=None, momenta=None, variances=variances, denominators=variances))


def roots(variances: list[Tensor], settings: AdamSettings, step: int) -> list[Tensor]:
    """√v̂ of each, new: rounded as all of a step is, where torch.sqrt is up to one unit in the last place off."""
    factors = replace(_factors(settings, step), eps=0.0)
    found = [torch.empty_like(variance) for variance in variances]
    execute_adam_step(AdamStep(factors, gradients=None, momenta=None, variances=variances, denominators=found))
    return found


def bound_updates(updates: Tensor, settings: AdamSettings, ranks: int) -> None:
    """Clamp one rank's m / (√v̂ + ε), in place, to ±√ranks · max(1, (1 - β₁) / √(1 - β₂)); infinity becomes NaN.

    That is the bound of an update where the variance follows every gradient (Kingma & Ba 2015, section 2.1); a rank's
    own gradient is noisier than the average by up to √ranks. With a variance that waits for its next update, or is
    frozen, nothing else stops gradients that grow by the very updates they cause.
    """
    bound = ranks**0.5 * max(1.0, (1 - settings.beta1) / (1 - settings.beta2) ** 0.5)
    zero_or_nan = updates - updates
    updates.clamp_(-bound, bound).add_(zero_or_nan)


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


class Adam(Algorithm):
    """AdamW; once frozen `exp_avg` is what the ranks agreed on: m / (√v̂ + ε), or m with `compressed="momentum"`.

    `denominator` is √v̂ + ε, infinite at coordinates that stay. The warmup's averages are taken into the moments as the
    weights move, in one pass; frozen steps are what `form` says.
    """

    state: Mapping[str, Keep] = {"exp_avg": Keep.EVERY_RANK, "exp_avg_sq": Keep.OWNER}
    frozen_state: ClassVar[Mapping[str, str | None]] = {"exp_avg": "exp_avg", "denominator": "exp_avg_sq"}

    def __init__(self, compressed: Compressed) -> None:
        self._compressed = compressed
        if compressed == "update":
            self.form = Form("exp_avg", "denominator", payload="divided", update="plain")
        else:
            self.form = Form("exp_avg", "denominator", payload="masked", update="divided")

    @override
    def move(self, groups: Sequence[Members], clock: Clock) -> None:
        for members in groups:
            warmup_step(members, clock.steps)

    @override
    def freeze(
        self, groups: Sequence[Members], clock: Clock, agree: Agreement, precondition: Callable[[], None]
    ) -> None:
        for members in groups:
            to_denominators(members["denominator"], members.settings, clock.steps)
        if self._compressed == "update":
            precondition()

    @override
    def rates(self, parameters: Sequence[int], settings: AdamSettings, clock: Clock) -> list[tuple[float, float]]:
        rate = settings.lr / settings.first_correction(clock.steps)
        return [(rate, 1 - settings.lr * settings.weight_decay)] * len(parameters)


class OneBitAdam(CompressedOptimizer):
    """Adam that sends one bit an element: error-compensated 1-bit Adam (Tang et al. 2021, arXiv 2102.02888).

    Swap the class and delete the DDP wrapper: gradients leave during `backward()`, bucket by bucket, and `step()`
    applies what every rank then holds, bit for bit the same. In the warmup it is AdamW on exactly averaged
    gradients; from the freeze on, the variance stays and the ranks exchange the momentum through `codec`, with error
    feedback on both legs (Algorithm 1), divided by the frozen √v + ε unless `compress="momentum"`. Single process,
    torchrun, mpirun and srun need no change to the script.

    With `stage` 1 or 2 the state is sharded: sharded AdamW until the freeze, at which owners publish 1 / (√v̂ + ε) in 8
    bits; then every worker moves its own replica of the weights by what comes back. 16-bit replicas are rounded
    stochastically, with one seed on all ranks, and are taken from the fp32 master weights again every `resync_interval`
    steps. Bytes an element of a 16-bit model once frozen: weights 2, worker residual 2, preconditioner 1, momentum 1/8,
    and (master 4 + owner residual 4) / ranks; `max_norm` and fp16 training add 2, for the residual before the step.

    Args:
        params: parameters, groups, or `model.named_parameters()`; fp32, bf16 or fp16, on one device; the same on every
            rank. 16-bit parameters get fp32 master weights. Rank 0's weights are given to all. A group may hold
            `exp_avg_mask`, a tensor that broadcasts to its parameters, or a flat one of as many elements: momentum is
            held at zero, once frozen, where the mask is zero.
        lr: learning rate.
        freeze_step: warmup steps before the variance is frozen; "auto" freezes when it has settled.
        betas, eps, weight_decay: as in torch.optim.AdamW; decay is decoupled.
        bias_correction: divide the moments by 1 - βᵗ, as Adam does. The paper's pseudocode has none: pass False.
        eps_inside_sqrt: divide by √(v + ε) instead of √v + ε.
        amsgrad: must be False; a frozen variance has no maximum to keep.
        compress: what the frozen stage compresses: "update" m / (√v + ε), or as in the paper, at stage 0, "momentum" m,
            whose bits a coordinate with a small variance amplifies (docs/measurements has them).
        options: stage 0, 1 or 2, and the others of `HomeOptions`.

    A coordinate whose variance is 0 at the freeze stays where it is (decay aside). A parameter without a gradient on
    any rank is left alone in the warmup, as in AdamW; once frozen its gradient counts as zero. A step in which any
    rank's gradient is not finite is skipped on all of them, with one warning.
    """

    freeze_step = FreezeOption()
    adam_freeze_key = CompressedOptimizer.frozen  # as scripts written for other libraries call it

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        freeze_step: int | Literal["auto"] = "auto",
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
        recipe = Recipe(
            algorithm=lambda: Adam(compress),
            settings={"compress": compress},
            schedule={},
            freeze_step=freeze_step,
            stages=(0, 1, 2),
            check=lambda: check_compress(amsgrad, compress, options.get("stage", 0)),
        )
        super().__init__(params, defaults, recipe, options)
