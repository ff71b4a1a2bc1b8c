"""1-bit Lion: what an optimizer adds to the house, from its formulas to its public class. docs/internals walks
through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from thinwire.optim.adam import decay
from thinwire.optim.algorithm import Agreement, Algorithm, Form, Keep
from thinwire.optim.optimizer import CompressedOptimizer
from thinwire.optim.options import HomeKeywords, Recipe, check_group
from thinwire.optim.step import Clock, Members


class Lion(Algorithm):
    """Lion (Chen et al. 2023, arXiv 2302.06675, Algorithm 2), whose interpolation c = β₁ m + (1 - β₁) g is exchanged.

    Weights move by its sign; what the ranks agreed on gives back the gradient that the momentum follows.
    """

    state: Mapping[str, Keep] = {"exp_avg": Keep.EVERY_RANK}
    freezes = False
    form = Form("exp_avg", None, payload="plain", update=None)

    @override
    def compressed(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """m ← β₂ m + (1 - β₂) g, with g = (c - β₁ m) / (1 - β₁)."""
        for members in groups:
            beta1, beta2 = members.settings.beta1, members.settings.beta2
            weight = (1 - beta2) / (1 - beta1)
            torch._foreach_mul_(members["exp_avg"], beta2 - weight * beta1)
            torch._foreach_add_(members["exp_avg"], members.averages, alpha=weight)

    @override
    def move(self, groups: Sequence[Members], clock: Clock) -> None:
        """w ← (1 - lr λ) w - lr · sign(c)."""
        for members in groups:
            decay(members.weights, members.settings)
            directions = torch._foreach_sign(members.averages)
            torch._foreach_add_(members.weights, directions, alpha=-members.settings.lr)


class OneBitLion(CompressedOptimizer):
    """Lion that sends one bit an element from the first step on, with error feedback on both legs.

    Synchronises by itself as OneBitAdam does, with the same calls, groups and checkpoints. There is no warmup and no
    variance: `frozen` holds from the start. Lion takes a learning rate 3 to 10 times below AdamW's, and a weight decay
    as many times above it.

    Args:
        params: as in OneBitAdam.
        lr: learning rate, which every coordinate moves by.
        betas: β₁ of what is exchanged, and β₂ of the momentum.
        weight_decay: λ, decoupled.
        options: stage 0 or 1, and the others of `HomeOptions`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[HomeKeywords],
    ) -> None:
        recipe = Recipe(
            algorithm=Lion,
            settings={"exchanges": "interpolation"},
            schedule={},
            stages=(0, 1),
            check=lambda: None,
            check_group=_check_group,
        )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, recipe, options)


def _check_group(group: Mapping[str, Any]) -> None:
    check_group(group)
    if "exp_avg_mask" in group:
        raise ValueError("OneBitLion has no exp_avg_mask: set requires_grad, or multiply the parameter by the mask")
