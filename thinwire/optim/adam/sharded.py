"""1-bit Adam on sharded state: sharded AdamW until the freeze, one bit an element and ZeRO's memory from then on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm import Communicator
from thinwire.compress.codecs import DEFAULT_BLOCK_SIZE
from thinwire.optim.sharded.packed_optimizer import ShardedOneBitOptimizer
from thinwire.zero import LARGEST_BUCKET_BYTES

__all__ = ["ShardedOneBitAdam"]


class ShardedOneBitAdam(ShardedOneBitOptimizer):
    """Error-compensated 1-bit Adam (Tang et al. 2021, arXiv 2102.02888) on ZeRO stage 0, 1 or 2.

    In the warmup this is `ShardedOptimizer(..., torch.optim.AdamW)`. At the freeze owners publish 1 / (√v̂ + ε) in 8
    bits; from then on every worker sends the momentum, divided by it, in one bit an element, and moves its own replica
    of the weights by what comes back. 16-bit replicas are rounded stochastically, with one seed on all ranks, and are
    taken from the fp32 masters again every `resync_interval` steps. Bytes an element of a 16-bit model once frozen:
    weights 2, worker residual 2, preconditioner 1, momentum 1/8, and (master 4 + owner residual 4) / ranks; `max_norm`
    and fp16 training add 2, for the residual before the step.

    Args:
        params, comm, named_parameters, param_dtype, bucket_bytes, offload, pin_memory: as in ShardedOptimizer. A group
            may hold `exp_avg_mask`, a tensor that broadcasts to its parameters: once frozen they stay where it is zero.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        freeze_step: warmup steps before the variance is frozen; "auto" freezes when it has settled.
        stage: 0, 1 or 2; gradients live for the bucket in flight only once frozen, whatever the stage, unless
            `no_sync` accumulates them.
        max_norm: global norm that gradients are clipped to, 0 for none. Once frozen the averaged gradient's norm is
            estimated from random projections (`NormSketch`) to 0.5%, and the second leg waits for it.
        block_size: elements that share one scale.
        resync_interval: frozen steps between two comparisons of all replicas, and new copies of the masters.
        on_drift: what a comparison that fails does: "repair" with a warning, or "raise" a ReplicaDriftError.
        reversible: keep the residuals of before a step until it is applied, so that a skipped step leaves them
            untouched; by default for fp16 parameters and with `max_norm`.

    A step that is not finite on any rank is skipped on all of them: see `last_step`.
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
        stage: int = 1,
        comm: Communicator | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        param_dtype: torch.dtype | None = None,
        bucket_bytes: int = LARGEST_BUCKET_BYTES,
        max_norm: float = 0.0,
        offload: bool = False,
        pin_memory: bool = True,
        block_size: int = DEFAULT_BLOCK_SIZE,
        resync_interval: int = 100,
        on_drift: Literal["repair", "raise"] = "repair",
        reversible: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            torch.optim.AdamW,
            freeze_step=freeze_step,
            stage=stage,
            comm=comm,
            named_parameters=named_parameters,
            param_dtype=param_dtype,
            bucket_bytes=bucket_bytes,
            max_norm=max_norm,
            offload=offload,
            pin_memory=pin_memory,
            block_size=block_size,
            resync_interval=resync_interval,
            on_drift=on_drift,
            reversible=reversible,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )
