"""What the training loop drives: a model with an optimizer of its own, or with thinwire's engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from experiments.training.baseline import Averaged, AveragedAdamW, AveragedLamb
from experiments.training.plans import Plan
from thinwire import OneBitAdam, OneBitLamb, ShardedOneBitAdam, ZeroOneAdam
from thinwire.comm import Communicator
from thinwire.engine import Engine, initialize, load_config

__all__ = [
    "OPTIMIZERS",
    "PARENTS",
    "EngineLearner",
    "Learner",
    "LoopLearner",
    "PlainLearner",
    "parameter_groups",
    "zero_one_intervals",
]

OPTIMIZERS = {"adamw": "AdamW", "onebit-adam": "OneBitAdam"}
"""Names on command lines and in results, and in the engine's configurations."""

PARENTS = {"onebit-adam": "adamw", "zero-one-adam": "adamw", "onebit-lamb": "lamb"}
"""What sends a bit an element or less, and the exact optimizer each is compared with; `PlainLearner` has them all."""


SelfSynchronizing = Averaged | OneBitAdam | OneBitLamb | ZeroOneAdam
"""Optimizers whose ranks meet without anybody's help."""


class Learner(Protocol):
    """A model and what moves its weights.

    Attributes:
        module: the model.
        micro_batches: losses that it learns from in one step.
    """

    module: nn.Module
    micro_batches: int

    def __call__(self, *inputs: Tensor) -> Any:
        """Runs the model."""

    def learn(self, loss: Tensor) -> None:
        """Takes a micro-batch's gradients, and moves the weights after a step's last one. Collective."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent for gradients, weights or momentum."""

    @property
    def stage(self) -> str:
        """How it communicates now: "exact", or of a 1-bit optimizer "warmup" or, once frozen, "1-bit"."""

    @property
    def frozen_at(self) -> int | None:
        """The step at which a 1-bit optimizer froze its variance; None if it did not."""


class LoopLearner:
    """A model on every rank beside an optimizer that synchronises them by itself, as in a loop written by hand."""

    micro_batches = 1

    def __init__(
        self, model: nn.Module, plan: Plan, build: Callable[[list[dict[str, Any]]], SelfSynchronizing]
    ) -> None:
        """Gives `build` the parameter groups."""
        self.module = model
        self.optimizer = build(parameter_groups(model, plan.weight_decay))
        self._plan = plan
        self._steps = 0

    def __call__(self, *inputs: Tensor) -> Any:
        """See `Learner`."""
        return self.module(*inputs)

    def learn(self, loss: Tensor) -> None:
        """See `Learner`."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._plan.rate_at(self._steps)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._steps += 1
        # What is validated, and what training ends with, is one model and not one a rank.
        if isinstance(self.optimizer, ZeroOneAdam) and self._plan.is_validated_after(self._steps):
            self.optimizer.synchronize_weights()

    @property
    def bytes_sent(self) -> int:
        """See `Learner`."""
        return self.optimizer.bytes_sent

    @property
    def stage(self) -> str:
        """See `Learner`."""
        if isinstance(self.optimizer, Averaged):
            return "exact"
        return "1-bit" if self.optimizer.frozen else "warmup"

    @property
    def frozen_at(self) -> int | None:
        """See `Learner`."""
        return None if isinstance(self.optimizer, Averaged) else self.optimizer.freeze_step_taken


class PlainLearner(LoopLearner):
    """A `LoopLearner` with one of `PARENTS`' two sides, by name, as the plan says."""

    def __init__(self, model: nn.Module, plan: Plan, optimizer: str, comm: Communicator) -> None:
        """Builds it over all ranks of `comm`."""
        super().__init__(model, plan, lambda groups: _build(optimizer, groups, plan, comm))


def _build(optimizer: str, groups: list[dict[str, Any]], plan: Plan, comm: Communicator) -> SelfSynchronizing:
    match optimizer:
        case "adamw":
            return AveragedAdamW(groups, comm, lr=plan.learning_rate)
        case "lamb":
            return AveragedLamb(groups, comm, lr=plan.learning_rate)
        case "onebit-adam":
            return OneBitAdam(groups, lr=plan.learning_rate, freeze_step=plan.freeze_step, comm=comm)
        case "onebit-lamb":
            return OneBitLamb(groups, lr=plan.learning_rate, freeze_step=plan.freeze_step, comm=comm)
        case "zero-one-adam":
            return ZeroOneAdam(groups, lr=plan.learning_rate, comm=comm, **zero_one_intervals(plan))
    raise ValueError(f"optimizer must be one of {', '.join((*PARENTS.values(), *PARENTS))}, got {optimizer!r}")


class EngineLearner:
    """A model in `thinwire.initialize`'s engine: ZeRO stages, precisions, accumulation and checkpoints."""

    def __init__(self, model: nn.Module, plan: Plan, config: Mapping[str, Any], comm: Communicator) -> None:
        """Trains as `config` says, at the plan's learning rates where that has no scheduler.

        Raises:
            ValueError: on every rank, for a configuration that cannot work.
        """
        loaded = load_config(config, comm.size)
        scheduled = loaded.scheduler is not None
        self.engine: Engine
        self.engine, self._optimizer, _, _ = initialize(
            model=model,
            model_parameters=parameter_groups(model, plan.weight_decay),
            lr_scheduler=None if scheduled else lambda optimizer: _schedule(optimizer, plan),
            config=loaded,
            comm=comm,
        )
        self.module = self.engine.module
        self.micro_batches = self.engine.gradient_accumulation_steps()

    def __call__(self, *inputs: Tensor) -> Any:
        """See `Learner`."""
        return self.engine(*inputs)

    def learn(self, loss: Tensor) -> None:
        """See `Learner`."""
        self.engine.backward(loss)
        self.engine.step()

    @property
    def bytes_sent(self) -> int:
        """See `Learner`."""
        return self._optimizer.bytes_sent

    @property
    def stage(self) -> str:
        """See `Learner`."""
        if isinstance(self._optimizer, ShardedOneBitAdam):
            return "1-bit" if self._optimizer.frozen else "warmup"
        return "exact"

    @property
    def frozen_at(self) -> int | None:
        """See `Learner`."""
        return self._optimizer.frozen_at if isinstance(self._optimizer, ShardedOneBitAdam) else None


def zero_one_intervals(plan: Plan) -> dict[str, Any]:
    """0/1 Adam's options for runs of thousands of steps; its defaults are for hundreds of thousands.

    β₂ counts updates of the variance, of which there are fewer than 100 until the freeze: 0.999 would remember all of
    them alike, the large gradients of the beginning too.
    """
    return {
        "var_freeze_step": plan.fixed_freeze_step,
        "var_update_scaler": max(1, plan.fixed_freeze_step // 20),
        "betas": (0.9, 0.99),
        "local_step_scaler": plan.local_step_scaler,
        "local_step_clipper": 4,
    }


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices decay; biases and normalisation weights do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def _schedule(optimizer: torch.optim.Optimizer, plan: Plan) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: plan.rate_at(step) / plan.learning_rate)
