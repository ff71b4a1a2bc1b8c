"""0/1 Adam as a drop-in torch optimizer: one bit an element almost from the start, later steps that send nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm import Communicator
from thinwire.compress.codecs import DEFAULT_BLOCK_SIZE, CodecName
from thinwire.optim import options as agreement
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.optim.replicated.freeze_group import Compressed
from thinwire.optim.replicated.optimizer import Nodes, OneBitOptimizer, WarmupWire
from thinwire.optim.zero_one.algorithm import ZeroOneCohort
from thinwire.optim.zero_one.schedule import ZeroOneSchedule, check_count
from thinwire.zero import BucketLayout

__all__ = ["ZeroOneAdam"]


class ZeroOneAdam(OneBitOptimizer):
    """Adam that sends one bit an element or nothing: 0/1 Adam (Lu et al. 2022, arXiv 2202.06009, Algorithm 1).

    Synchronises by itself as OneBitAdam does, with the same calls, groups and checkpoints. Until `var_freeze_step`,
    steps divisible by the variance interval average gradients exactly, and update momentum and variance; the others
    average them through `codec`, with error feedback, and leave the variance alone. Then the variance is frozen,
    residuals start from zero, and ranks take local steps of Adam without any communication. At steps divisible by the
    local interval they meet: the average momentum since the last sync, weighted by learning rate, goes through `codec`,
    and every rank moves by it from the weights of the last sync. After a sync the weights are the same bits on every
    rank; between two they differ, see `in_sync` and `synchronize_weights`.

    Args:
        params, lr, betas, eps, weight_decay, bias_correction, eps_inside_sqrt, amsgrad, comm, comm_backend_name,
            block_size, bucket_bytes, nodes: as in OneBitAdam. `exp_avg_mask` in a group holds from the first step on.
            The bias correction of the variance counts its updates.
        var_freeze_step: steps before the variance is frozen.
        var_update_scaler: updates of the variance after which their interval doubles, beginning at 1.
        local_step_scaler: steps with a frozen variance after which the local interval doubles, beginning at 1.
        local_step_clipper: the longest local interval; 1 for no local steps.
        compress: what is compressed: "update", momenta divided by √v̂ + ε, with denominators of at least a hundredth of
            their parameter's mean, and clamped to ±√ranks · max(1, (1 - β₁) / √(1 - β₂)), Adam's own bound for a rank;
            or as in the paper "momentum", gradients while the variance moves, then momenta.
        codec: how: "sign1" (1 bit), "int8", "bf16" or "none".
        warmup_wire: "fp32" sends what is averaged exactly in full, "bf16" sends half the bytes.

    A coordinate stays where it is (decay aside) until an exact step brings it a variance. A parameter without a
    gradient on any rank is left alone in an exact step; in others its gradient counts as zero, and in a local step no
    rank can know of the others'. A step in which any rank's gradient is not finite is skipped on all of them; in a
    local step that rank alone adds nothing, see `left_out_steps`. Memory beside OneBitAdam's, bytes an element: 4 for
    the denominators and 8 for residuals from the start; once frozen 4 for the mean, 4 for fp32 parameters' masters.

    Raises:
        ValueError: bad hyperparameters, no parameters, or ranks that do not hold the same ones; on every rank.
        TypeError: complex, integer or fp64 parameters, or parameters on several devices.
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
        comm: Communicator | None = None,
        comm_backend_name: Literal["nccl", "gloo", "mpi"] | None = None,
        compress: Compressed = "update",
        codec: CodecName = "sign1",
        block_size: int = DEFAULT_BLOCK_SIZE,
        bucket_bytes: int | None = None,
        warmup_wire: WarmupWire = "fp32",
        nodes: Nodes = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt,
        }
        self._amsgrad = amsgrad
        self._compressed = compress
        self._var_freeze_step = var_freeze_step
        self._intervals = {
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }
        super().__init__(
            params,
            defaults,
            freeze_step=var_freeze_step,
            comm=comm,
            comm_backend_name=comm_backend_name,
            codec=codec,
            block_size=block_size,
            bucket_bytes=bucket_bytes,
            warmup_wire=warmup_wire,
            nodes=nodes,
        )

    @property
    def in_sync(self) -> bool:
        """Whether all ranks hold the same weights: no local step has been taken since the last sync."""
        return all(cohort.in_sync for cohort in self._zero_one_cohorts())

    @property
    def left_out_steps(self) -> int:
        """Local steps to which this rank added nothing, as its gradient was not finite."""
        return sum(cohort.left_out_steps for cohort in self._zero_one_cohorts())

    @torch.no_grad()
    def synchronize_weights(self) -> None:
        """Meet the other ranks now, so that all hold the same weights: before evaluation, a checkpoint of the model, or
        any change of weights. Collective, unless the ranks are in sync already: call it at the same step on every rank.

        This is a sync between two steps, 1 bit an element: training goes on from there, not bit for bit as without.
        Raises RuntimeError between backward() and step().
        """
        if self._synchronizer.in_round:
            raise RuntimeError("synchronize_weights() was called between backward() and step(): call step() first")
        for cohort in self._zero_one_cohorts():
            cohort.synchronize(self._synchronizer.step)

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Refused with a RuntimeError: to agree on what to leave out takes a message, and local steps send none."""
        raise RuntimeError(
            "ZeroOneAdam leaves no parameters out of a step: without a gradient on any rank they count as zero by "
            "themselves. Use OneBitAdam to save their bytes"
        )

    def _check_options(self) -> None:
        agreement.check_options(self._amsgrad, self._compressed)
        self._schedule = ZeroOneSchedule(**self._intervals)
        check_count("var_freeze_step", self._var_freeze_step)

    def _own_settings(self) -> dict[str, Any]:
        return {"compress": self._compressed}

    def _stage_settings(self) -> dict[str, Any]:
        return {"var_freeze_step": self._var_freeze_step, **self._intervals}

    @property
    def _scales_apart(self) -> bool:
        # Local steps leave every rank's GradScaler alone with its overflows.
        return self._loss_scale is not None and any(cohort.frozen_at is not None for cohort in self._cohorts)

    def _is_outdated(self, scale_changed: bool) -> bool:
        return scale_changed or any(cohort.is_outdated() for cohort in self._zero_one_cohorts())

    def _zero_one_cohorts(self) -> list[ZeroOneCohort]:
        return [cohort for cohort in self._cohorts if isinstance(cohort, ZeroOneCohort)]

    def _new_cohort(self, rule: FreezeRule, layouts: Sequence[BucketLayout], first_index: int) -> ZeroOneCohort:
        return ZeroOneCohort(
            self._table,
            self._exchange_comm,
            rule,
            self._warmup_codec,
            self._codec,
            self._compressed,
            layouts,
            first_index,
            self._links,
            self._schedule,
        )
