"""1-bit Adam (Tang et al. 2021, arXiv 2102.02888): Adam until the freeze, momentum over a variance that stays from then
on, one bit an element; and its class, a drop-in torch optimizer that synchronises by itself, during backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from thinwire.optim.algorithm import Agreement, Clock, Contribution, Keep, Linear, Members
from thinwire.optim.form import MoveRule, PayloadRule
from thinwire.optim.formulas import (
    AdamSettings,
    apply_updates,
    frozen_update,
    hold_masked,
    raise_smallest,
    to_denominators,
    warmup_step,
)
from thinwire.optim.freeze_rule import make_freeze_rule
from thinwire.optim.optimizer import CompressedOptimizer
from thinwire.optim.options import HomeKeywords, Recipe, check_compress

__all__ = ["Adam", "Compressed", "OneBitAdam"]


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

    @override
    def absorb_exact(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """`move` takes the averages into the moments, as it moves the weights, in one pass."""

    @override
    def absorb_compressed(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """The momentum is there already."""

    @override
    def freeze(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        for members in groups:
            denominators = members["denominator"]
            to_denominators(denominators, members.settings, clock.steps)
            hold_masked(denominators, members.mask)
            if self._compressed == "update":
                raise_smallest(denominators)
                torch._foreach_div_(members["exp_avg"], denominators)

    @override
    def move(self, groups: Sequence[Members], clock: Clock) -> None:
        for members in groups:
            weights, momenta, settings = members.weights, members["exp_avg"], members.settings
            if not clock.frozen:
                warmup_step(members.averages, weights, momenta, members["exp_avg_sq"], settings, clock.steps)
            elif self._compressed == "update":
                apply_updates(weights, momenta, settings, clock.steps)
            else:
                frozen_update(weights, momenta, members["denominator"], settings, clock.steps)

    @override
    def rates(self, parameter: int, settings: AdamSettings, clock: Clock) -> tuple[float, float]:
        return settings.lr / settings.first_correction(clock.steps), 1 - settings.lr * settings.weight_decay

    @override
    def hold_masked(self, state: Mapping[str, Tensor], mask: Tensor) -> None:
        if "denominator" in state:
            hold_masked([state["denominator"]], mask)

    @override
    def zero_variance(self, state: Mapping[str, Tensor]) -> Tensor | None:
        return torch.isinf(state["denominator"]) if "denominator" in state else None


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
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt,
        }
        recipe = Recipe(
            algorithm=lambda: Adam(compress),
            rule=lambda beta2: make_freeze_rule(freeze_step, beta2),
            settings={"compress": compress},
            schedule={"freeze_step": freeze_step},
            stages=(0, 1, 2),
            check=lambda: check_compress(amsgrad, compress, options.get("stage", 0)),
        )
        super().__init__(params, defaults, recipe, options)
