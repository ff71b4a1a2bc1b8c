"""The baselines people use: torch's DistributedDataParallel, its gradients compressed by a hook or not."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from experiments.training.hooks import bf16_hook, meeting_hook
from experiments.training.learners import in_evaluation, parameter_groups
from experiments.training.plans import Plan
from thinwire.comm import Communicator
from thinwire.comm.traffic import sent_bytes
from thinwire.optim import Muon
from thinwire.optim.muon import mark_matrices

__all__ = ["AloneLearner", "DataParallelLearner"]

_EARLIEST_POWER_SGD = 2
"""Steps averaged exactly before PowerSGD begins, at least: torch asks for it."""


class AloneLearner:
    """The same model and optimizer on every rank with nobody to talk to: what a step computes.

    `stage`, `frozen_at`, `bytes_sent`: as in `experiments.training.learners.Learner`; nothing is sent.
    """

    micro_batches = 1
    stage = "alone"
    frozen_at: int | None = None
    bytes_sent = 0

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        """Steps with torch's fused AdamW."""
        self.module = model
        self._optimizer = _adamw(model, plan)

    def __call__(self, *inputs: Tensor) -> Any:
        """See `Learner`."""
        return self.module(*inputs)

    def learn(self, loss: Tensor) -> None:
        """See `Learner`."""
        loss.backward()
        self.update()

    def evaluating(self) -> AbstractContextManager[None]:
        """See `Learner`."""
        return in_evaluation(self.module)

    def update(self) -> None:
        """What `learn` does after backward."""
        self._optimizer.step()
        self._optimizer.zero_grad()


class DataParallelLearner:
    """DDP over the job's default process group, with torch's fused AdamW or Muon; a `Learner`.

    Attributes:
        module: the model, DDP's wrapper left out.
        bytes_sent: by this rank, as `thinwire.comm.work` counts an all-reduce.
    """

    micro_batches = 1
    frozen_at: int | None = None

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        comm: Communicator,
        hook: Literal["none", "bf16", "meet"] | int = "none",
        muon_rate: float | None = None,
    ) -> None:
        """Sends gradients as they are, in bf16, from the plan's freeze on through PowerSGD of a rank, or only meets;
        steps with Muon, at `muon_rate` times the plan's learning rate, if that is given."""
        self.module = model
        self.bytes_sent = 0
        self._plan = plan if muon_rate is None else replace(plan, learning_rate=muon_rate * plan.learning_rate)
        self._ranks = comm.size
        self._elements = sum(parameter.numel() for parameter in model.parameters())
        self._element_bytes = {"bf16": 2, "meet": 0}.get(str(hook), 4)
        # PowerSGD's rounds follow one another from Gloo's threads: those of two buckets may pass each other in another
        # order on each rank, which Gloo answers by aborting. So its gradients leave in one bucket.
        bucket = None if isinstance(hook, str) else 1 + 4 * self._elements // 2**20
        self._wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket)
        self._power: powerSGD_hook.PowerSGDState | None = None
        if hook == "bf16":
            self._wrapped.register_comm_hook(None, bf16_hook)
        elif hook == "meet":
            self._wrapped.register_comm_hook(None, meeting_hook)
        elif hook != "none":
            self._power = powerSGD_hook.PowerSGDState(
                None,
                matrix_approximation_rank=hook,
                start_powerSGD_iter=max(_EARLIEST_POWER_SGD, plan.fixed_freeze_step),
            )
            self._wrapped.register_comm_hook(self._power, powerSGD_hook.powerSGD_hook)
        self._optimizer = _adamw(model, plan) if muon_rate is None else _muon(model, self._plan)
        self._steps = 0

    def __call__(self, *inputs: Tensor) -> Any:
        """See `Learner`."""
        return self._wrapped(*inputs)

    def learn(self, loss: Tensor) -> None:
        """See `Learner`."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._plan.rate_at(self._steps)
        compressed_before = self._power_elements
        loss.backward()
        # PowerSGD counts what it compresses, and nothing before it begins.
        compressed = self._power_elements - compressed_before
        nbytes = 4 * compressed if compressed else self._element_bytes * self._elements
        self.bytes_sent += sent_bytes("all_reduce", nbytes, self._ranks)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1

    def evaluating(self) -> AbstractContextManager[None]:
        """See `Learner`."""
        return in_evaluation(self.module)

    @property
    def stage(self) -> str:
        """See `Learner`."""
        return "low rank" if self._power_elements else "exact"

    @property
    def _power_elements(self) -> int:
        return 0 if self._power is None else int(self._power.total_numel_after_compression)


def _muon(model: nn.Module, plan: Plan) -> Muon:
    mark_matrices(model.named_parameters(), model)
    groups = parameter_groups(model, plan.weight_decay)
    return Muon(groups, lr=plan.learning_rate, adjust_lr_fn="match_rms_adamw")


def _adamw(model: nn.Module, plan: Plan) -> torch.optim.AdamW:
    groups = parameter_groups(model, plan.weight_decay)
    return torch.optim.AdamW(groups, lr=plan.learning_rate, fused=True)
