"""1-bit Adam as a drop-in torch optimizer: it synchronises by itself, during backward, and sends one bit
an element once the variance is frozen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm import Communicator
from thinwire.compress.codecs import DEFAULT_BLOCK_SIZE, CodecName
from thinwire.optim import options as agreement
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.optim.replicated.freeze_group import Cohort, Compressed
from thinwire.optim.replicated.optimizer import Nodes, OneBitOptimizer, WarmupWire
from thinwire.zero import BucketLayout

__all__ = ["OneBitAdam"]


class OneBitAdam(OneBitOptimizer):
    """Adam that sends one bit an element: error-compensated 1-bit Adam (Tang et al. 2021, arXiv 2102.02888).

    Swap the class and delete the DDP wrapper: gradients leave during `backward()`, bucket by bucket, and `step()`
    applies what every rank then holds, bit for bit the same. In the warmup it is AdamW on exactly averaged
    gradients; from the freeze on, the variance stays and the ranks exchange the momentum through `codec`, with error
    feedback on both legs (Algorithm 1), divided by the frozen √v + ε unless `compress="momentum"`. Single process,
    torchrun, mpirun and srun need no change to the script.

    Args:
        params: parameters or groups, fp32, bf16 or fp16, on one device; the same on every rank. 16-bit parameters get
            fp32 master weights. Rank 0's weights are broadcast. A group may hold `exp_avg_mask`, a tensor that
            broadcasts to its parameters: momentum is held at zero, once frozen, where the mask is zero.
        lr: learning rate.
        freeze_step: warmup steps before the variance is frozen; "auto" freezes when it has settled.
        betas, eps, weight_decay: as in torch.optim.AdamW; decay is decoupled.
        bias_correction: divide the moments by 1 - βᵗ, as Adam does. The paper's pseudocode has none: pass False.
        eps_inside_sqrt: divide by √(v + ε) instead of √v + ε.
        amsgrad: must be False; a frozen variance has no maximum to keep.
        comm: a Communicator; by default `thinwire.comm.init()` finds out how the process was launched.
        comm_backend_name: "nccl", "gloo" or "mpi", where `comm` is not given and the choice must not be automatic.
        compress: what the frozen stage compresses: "update" m / (√v + ε), or as in the paper "momentum" m, whose bits a
            coordinate with a small variance amplifies (docs/design.md has the measurements).
        codec: how: "sign1" (1 bit), "int8", "bf16" or "none".
        block_size: elements that share one scale, a multiple of 64.
        bucket_bytes: fp32 bytes of gradients that leave together; None is an eighth of the model, from 1 to 16 MiB.
        warmup_wire: "fp32" averages the warmup's gradients exactly, "bf16" sends half the bytes.
        nodes: which ranks share a node, where some do: their gradients are added up exactly inside it, and nodes are
            the algorithm's workers. "auto" asks the launcher and the hosts, "flat" takes every rank for a node;
            else the node's number for each rank.

    A coordinate whose variance is 0 at the freeze stays where it is (decay aside). A parameter without a gradient on
    any rank is left alone in the warmup, as in AdamW; once frozen its gradient counts as zero. A step in which any
    rank's gradient is not finite is skipped on all of them, with one warning.

    Raises:
        ValueError: bad hyperparameters, no parameters, or ranks that do not hold the same ones; on every rank.
        TypeError: complex, integer or fp64 parameters, or parameters on several devices.
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
        super().__init__(
            params,
            defaults,
            freeze_step=freeze_step,
            comm=comm,
            comm_backend_name=comm_backend_name,
            codec=codec,
            block_size=block_size,
            bucket_bytes=bucket_bytes,
            warmup_wire=warmup_wire,
            nodes=nodes,
        )

    def _check_options(self) -> None:
        agreement.check_options(self._amsgrad, self._compressed)

    def _own_settings(self) -> dict[str, Any]:
        return {"compress": self._compressed}

    def _new_cohort(self, rule: FreezeRule, layouts: Sequence[BucketLayout], first_index: int) -> Cohort:
        return Cohort(
            self._table,
            self._exchange_comm,
            rule,
            self._warmup_codec,
            self._codec,
            self._compressed,
            layouts,
            first_index,
            self._links,
        )
