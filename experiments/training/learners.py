"""What the training loop drives: a model with an optimizer of its own, or with thinwire's engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from experiments.training.optimizers import COMPRESSED, OUTER, build
from experiments.training.plans import Plan
from thinwire import initialize
from thinwire.comm import Communicator
from thinwire.engine import Engine, load_config
from thinwire.optim.muon import mark_matrices

__all__ = ["EngineLearner", "Learner", "LoopLearner", "in_evaluation", "parameter_groups"]


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

    def evaluating(self) -> AbstractContextManager[None]:
        """The module in evaluation mode, with the weights that all ranks have in common; nothing is sent."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent for gradients, weights or momentum."""

    @property
    def stage(self) -> str:
        """How it communicates now: "exact"; DiLoCo "local"; 1-bit optimizers "warmup" and, once frozen, "1-bit"."""

    @property
    def frozen_at(self) -> int | None:
        """The step at which a 1-bit optimizer froze its variance; None if it did not."""


class LoopLearner:
    """A model on every rank beside an optimizer that synchronises them by itself, as in a loop written by hand."""

    micro_batches = 1

    def __init__(self, model: nn.Module, plan: Plan, optimizer: str, comm: Communicator, **options: Any) -> None:
        """Builds one of `OPTIMIZERS` over all ranks of `comm`, as the plan and `options` say. Collective."""
        mark_matrices(model.named_parameters(), model)
        self.module = model
        self._compressed = COMPRESSED.get(optimizer)
        self._has_outer_weights = optimizer in OUTER
        # DiLoCo's fragments are layers, which the names tell.
        groups = parameter_groups(model, plan.weight_decay, named=self._has_outer_weights)
        self._optimizer: Any = build(optimizer, groups, plan, comm, **options)
        self._plan = plan
        self._steps = 0

    def __call__(self, *inputs: Tensor) -> Any:
        """See `Learner`."""
        return self.module(*inputs)

    def learn(self, loss: Tensor) -> None:
        """See `Learner`."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._plan.rate_at(self._steps)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        # What is validated, and what training ends with, is one model and not one a rank.
        local_steps = self._compressed is not None and self._compressed.local_steps
        ended = self._steps >= self._plan.steps
        if (local_steps and self._plan.is_validated_after(self._steps)) or (self._has_outer_weights and ended):
            self._optimizer.synchronize_weights()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """See `Learner`: of DiLoCo the outer weights, which its workers' own are about to leave or to meet."""
        if self._has_outer_weights:
            self._optimizer.eval()
        try:
            with in_evaluation(self.module):
                yield
        finally:
            if self._has_outer_weights:
                self._optimizer.train()

    @property
    def bytes_sent(self) -> int:
        """See `Learner`."""
        sent: int = self._optimizer.bytes_sent
        return sent

    @property
    def stage(self) -> str:
        """See `Learner`."""
        if self._has_outer_weights:
            return "local"
        return "exact" if self._compressed is None else _stage(self._optimizer)

    @property
    def frozen_at(self) -> int | None:
        """See `Learner`."""
        return None if self._compressed is None else self._optimizer.frozen_at


class EngineLearner:
    """A model in `thinwire.initialize`'s engine: ZeRO stages, precisions, accumulation and checkpoints."""

    def __init__(self, model: nn.Module, plan: Plan, config: Mapping[str, Any], comm: Communicator) -> None:
        """Trains as `config` says, at the plan's learning rates where that has no scheduler.

        Raises:
            ValueError: on every rank, for a configuration that cannot work.
        """
        loaded = load_config(config, comm.size)
        scheduled = loaded.scheduler is not None
        types = {one.class_name for one in COMPRESSED.values()}
        self._compresses = loaded.optimizer is not None and loaded.optimizer.type in types
        self.engine: Engine
        self._optimizer: Any
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

    def evaluating(self) -> AbstractContextManager[None]:
        """See `Learner`."""
        return in_evaluation(self.module)

    @property
    def bytes_sent(self) -> int:
        """See `Learner`."""
        sent: int = self._optimizer.bytes_sent
        return sent

    @property
    def stage(self) -> str:
        """See `Learner`."""
        return _stage(self._optimizer) if self._compresses else "exact"

    @property
    def frozen_at(self) -> int | None:
        """See `Learner`."""
        return self._optimizer.frozen_at if self._compresses else None


@contextmanager
def in_evaluation(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode, and in training mode afterwards."""
    module.eval()
    try:
        yield
    finally:
        module.train()


def parameter_groups(model: nn.Module, weight_decay: float, *, named: bool = False) -> list[dict[str, Any]]:
    """Two groups: matrices decay; biases and normalisation weights do not. `named`: as pairs of a name and each."""
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [pair for pair in parameters if pair[1].ndim > 1], "weight_decay": weight_decay},
        {"params": [pair for pair in parameters if pair[1].ndim <= 1], "weight_decay": 0.0},
    ]
    if not named:
        groups = [{**group, "params": [one for _, one in group["params"]]} for group in groups]
    return groups


def _stage(optimizer: Any) -> str:
    return "1-bit" if optimizer.frozen else "warmup"


def _schedule(optimizer: torch.optim.Optimizer, plan: Plan) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: plan.rate_at(step) / plan.learning_rate)
