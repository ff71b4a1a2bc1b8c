"""deepspeed.ops.lion: Lion by DeepSpeed's arguments, on any device."""

from __future__ import annotations

from torch.optim.optimizer import ParamsT

from thinwire.optim import Lion

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class FusedLion(Lion):
    """thinwire's Lion, with DeepSpeed's defaults: a rate of 1e-3, and 0.999 as its second beta."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


DeepSpeedCPULion = FusedLion
