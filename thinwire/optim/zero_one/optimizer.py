"""0/1 Adam as a drop-in torch optimizer: one bit an element almost from the start, later steps that send nothing."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.optim.adam.algorithm import Compressed
from thinwire.optim.freeze_rule import FixedFreeze
from thinwire.optim.home_options import HomeKeywords
from thinwire.optim.optimizer import CompressedOptimizer
from thinwire.optim.options import check_compress, check_count
from thinwire.optim.recipe import Recipe
from thinwire.optim.zero_one.algorithm import ZeroOne
from thinwire.optim.zero_one.schedule import ZeroOneSchedule

__all__ = ["ZeroOneAdam"]


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
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt,
        }
        intervals = {
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }

        def check() -> None:
            check_compress(amsgrad, compress, options.get("stage", 0))
            ZeroOneSchedule(**intervals)
            check_count("var_freeze_step", var_freeze_step)

        recipe = Recipe(
            algorithm=lambda: ZeroOne(compress, ZeroOneSchedule(**intervals)),
            rule=lambda beta2: FixedFreeze(var_freeze_step),
            settings={"compress": compress},
            schedule={"var_freeze_step": var_freeze_step, **intervals},
            stages=(0, 1),
            check=check,
        )
        super().__init__(params, defaults, recipe, options)

    @property
    def left_out_steps(self) -> int:
        """Local steps to which this rank added nothing, as its gradient was not finite."""
        return self._home.left_out_steps
