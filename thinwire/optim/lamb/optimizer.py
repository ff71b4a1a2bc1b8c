"""1-bit LAMB as a drop-in torch optimizer: layerwise coefficients for large batches, on the exchange of 1-bit Adam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.optim.adam.algorithm import Compressed
from thinwire.optim.freeze_rule import make_freeze_rule
from thinwire.optim.home_options import HomeKeywords
from thinwire.optim.lamb.algorithm import Lamb
from thinwire.optim.lamb.formulas import check_lamb_options
from thinwire.optim.optimizer import CompressedOptimizer
from thinwire.optim.options import check_compress, check_group
from thinwire.optim.recipe import Recipe

__all__ = ["OneBitLamb"]


class OneBitLamb(CompressedOptimizer):
    """LAMB that sends one bit an element: 1-bit LAMB (Li et al. 2021, arXiv 2104.06069).

    Synchronises by itself as OneBitAdam does, with the same calls, groups and checkpoints. Every parameter is a layer
    with a coefficient. In the warmup this is LAMB (You et al. 2019, arXiv 1904.00962) on exactly averaged gradients: a
    layer moves by u = m̂ / (√v̂ + ε) + λw times ‖w‖/‖u‖, within [min_coeff, max_coeff]; the average c of that
    coefficient is kept. From the freeze on v and c stay. The ranks exchange m / (√v̂ + ε), or with
    `compress="momentum"` m as in the paper, every layer scaled to one RMS, through `codec`, with error feedback, and
    the layer moves by c·r·u. r follows the largest √v / √v' of the layer, where v' is the variance of the gradients
    (m_t - β₁ m_{t-1}) / (1 - β₁) that the exchanged momenta imply; the part of u that is decay does not count.

    With `stage=1` the state is sharded as OneBitAdam's is, and the fresh variance v' with it: 4 bytes an element,
    divided by the ranks. Layers are cut where shards are: each owner adds up what of a layer's norms is in its shard.

    Args:
        params, lr, betas, eps, amsgrad, compress: as in OneBitAdam, `exp_avg_mask` in groups included.
        freeze_step: warmup steps before v and c are frozen; "auto" freezes when v has settled.
        weight_decay: λ.
        bias_correction: as in OneBitAdam.
        max_coeff, min_coeff: bounds of ‖w‖/‖u‖ in the warmup.
        coeff_beta: β of the average c, which is divided by 1 - βᵗ.
        factor_max, factor_min: bounds of r.
        factor_threshold: r changes by at most this part of itself a step.
        options: stage 0 or 1, and the others of `HomeOptions`.

    The six may differ by parameter group. A layer with ‖w‖ or ‖u‖ zero has coefficient 1, and leaves c alone. All else
    is as in OneBitAdam: coordinates whose variance is 0 at the freeze stay, decay aside; a step that is not finite on
    any rank is skipped on all of them.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        freeze_step: int | Literal["auto"] = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        amsgrad: bool = False,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        compress: Compressed = "update",
        **options: Unpack[HomeKeywords],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "coeff_beta": coeff_beta,
            "factor_max": factor_max,
            "factor_min": factor_min,
            "factor_threshold": factor_threshold,
        }
        recipe = Recipe(
            algorithm=lambda: Lamb(compress),
            rule=lambda beta2: make_freeze_rule(freeze_step, beta2),
            settings={"compress": compress},
            schedule={"freeze_step": freeze_step},
            stages=(0, 1),
            check=lambda: check_compress(amsgrad, compress, options.get("stage", 0)),
            check_group=_check_group,
        )
        super().__init__(params, defaults, recipe, options)

    def get_lamb_coeffs(self) -> list[float]:
        """What each parameter's learning rate was multiplied by in its last step, in the order of the groups; 1 for a
        parameter that has not stepped. The method's name is DeepSpeed's."""
        coefficients: dict[int, float] = {}
        for algorithm in self._home.algorithms:
            assert isinstance(algorithm, Lamb)
            coefficients |= algorithm.coefficients
        return [coefficients.get(index, 1.0) for index in range(len(self._home.parameters))]


def _check_group(group: Mapping[str, Any]) -> None:
    check_group(group)
    check_lamb_options(group)
