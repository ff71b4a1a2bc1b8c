"""One training loop for every experiment: the same data and weights, one optimizer or the other."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from experiments.baseline import AveragedAdamW
from thinwire import OneBitAdam
from thinwire.comm import Communicator

__all__ = ["OPTIMIZERS", "Curve", "Outcome", "Plan", "StepReport", "Task", "Trainer"]

OPTIMIZERS = ("adamw", "onebit-adam")


Model = TypeVar("Model", bound=nn.Module)


class Task(Protocol[Model]):
    """What is learned: a model, and losses as functions of (seed, step, rank) only."""

    def build_model(self, seed: int) -> Model:
        """A model whose weights depend on the seed only."""

    def training_loss(self, model: Model, seed: int, step: int, rank: int, ranks: int) -> Tensor:
        """Mean loss of the batch that this rank takes at this step, with its graph."""

    def validation_sum(self, model: Model, rank: int, ranks: int) -> tuple[float, int]:
        """Summed loss of the held-out examples that fall to this rank, and how many they are."""


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train.

    Attributes:
        steps: optimizer steps in all.
        warmup_steps: steps over which the learning rate rises linearly; then it falls linearly to zero.
        learning_rate: its peak.
        weight_decay: decoupled, on matrices only.
        freeze_step: when 1-bit Adam freezes the variance; "auto" lets it decide.
        evaluate_every: steps between validations; the last step is always validated.
        seed: of the weights and the batches.
    """

    steps: int
    warmup_steps: int
    learning_rate: float
    weight_decay: float
    freeze_step: int | Literal["auto"]
    evaluate_every: int
    seed: int

    def rate_at(self, step: int) -> float:
        """Learning rate of step 0, 1, ..., steps - 1."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        return self.learning_rate * (self.steps - step) / max(1, self.steps - self.warmup_steps)


@dataclass
class Curve:
    """Validation loss, in nats, after so many steps and so many bytes sent by one rank."""

    steps: list[int] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class StepReport:
    """What happened in one step, as seen by this rank.

    Attributes:
        step: steps done.
        loss: of this rank's batch, in nats.
        bytes_sent: by this rank in this step, for gradients or momentum.
        stage: "exact" for AdamW; "warmup" or "1-bit" for 1-bit Adam.
        validation_loss: over all ranks, if this step was validated.
    """

    step: int
    loss: float
    bytes_sent: int
    stage: str
    validation_loss: float | None


@dataclass(frozen=True)
class Outcome:
    """A finished run.

    Attributes:
        seed: of the weights and the batches.
        parameters: elements of the model.
        final_loss: validation loss after the last step, in nats.
        bytes_sent: by one rank in the whole run, for gradients or momentum.
        last_step_bytes: by one rank in the last step.
        frozen_at: the step at which 1-bit Adam froze its variance; None if it did not.
        seconds: of training and validation, checkpoints left out.
        curve: validation loss on the way.
    """

    seed: int
    parameters: int
    final_loss: float
    bytes_sent: int
    last_step_bytes: int
    frozen_at: int | None
    seconds: float
    curve: Curve


class Trainer:
    """Trains one model with one optimizer, a step at a call, and keeps its curve."""

    def __init__(self, task: Task[Any], plan: Plan, optimizer: str, comm: Communicator) -> None:
        """Builds the model from the plan's seed, and one of `OPTIMIZERS` over all ranks of `comm`."""
        self.task = task
        self.plan = plan
        self.comm = comm
        self.model = task.build_model(plan.seed)
        self.optimizer = _build_optimizer(optimizer, self.model, plan, comm)
        self.step = 0
        self.bytes_sent = 0
        self.step_bytes = 0
        self.seconds = 0.0
        self.curve = Curve()

    @property
    def finished(self) -> bool:
        """Whether every planned step is done."""
        return self.step >= self.plan.steps

    @property
    def stage(self) -> str:
        """How this optimizer communicates now."""
        if isinstance(self.optimizer, OneBitAdam):
            return "1-bit" if self.optimizer.frozen else "warmup"
        return "exact"

    @property
    def outcome(self) -> Outcome:
        """What the results say about this run, once it is finished."""
        return Outcome(
            seed=self.plan.seed,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            final_loss=self.curve.losses[-1],
            bytes_sent=self.bytes_sent,
            last_step_bytes=self.step_bytes,
            frozen_at=self.optimizer.freeze_step_taken if isinstance(self.optimizer, OneBitAdam) else None,
            seconds=round(self.seconds, 1),
            curve=self.curve,
        )

    def advance(self) -> StepReport:
        """Does one step on every rank, and validates when it is time to."""
        started = time.perf_counter()
        sent_before = self.optimizer.bytes_sent
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate_at(self.step)
        loss = self.task.training_loss(self.model, self.plan.seed, self.step, self.comm.rank, self.comm.size)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.step_bytes = self.optimizer.bytes_sent - sent_before
        self.bytes_sent += self.step_bytes
        due = self.finished or self.step % self.plan.evaluate_every == 0
        validation_loss = self._record() if due else None
        self.seconds += time.perf_counter() - started
        return StepReport(self.step, loss.item(), self.step_bytes, self.stage, validation_loss)

    def progress(self) -> dict[str, Any]:
        """All that is not in the model or the optimizer, as plain values."""
        return {
            "step": self.step,
            "bytes_sent": self.bytes_sent,
            "step_bytes": self.step_bytes,
            "seconds": self.seconds,
            "curve": asdict(self.curve),
        }

    def restore_progress(self, progress: dict[str, Any]) -> None:
        """Takes back what `progress` gave."""
        self.step = progress["step"]
        self.bytes_sent = progress["bytes_sent"]
        self.step_bytes = progress["step_bytes"]
        self.seconds = progress["seconds"]
        self.curve = Curve(**progress["curve"])

    def validate(self) -> float:
        """Mean validation loss over all ranks' shares, in nats; the model is not changed."""
        self.model.eval()
        with torch.no_grad():
            total, count = self.task.validation_sum(self.model, self.comm.rank, self.comm.size)
        self.model.train()
        sums = torch.tensor([total, count], dtype=torch.float64)
        self.comm.all_reduce(sums)
        return float(sums[0] / sums[1])

    def _record(self) -> float:
        loss = self.validate()
        self.curve.steps.append(self.step)
        self.curve.bytes_sent.append(self.bytes_sent)
        self.curve.losses.append(loss)
        return loss


def _build_optimizer(name: str, model: nn.Module, plan: Plan, comm: Communicator) -> AveragedAdamW | OneBitAdam:
    groups = _parameter_groups(model, plan.weight_decay)
    if name == "adamw":
        return AveragedAdamW(groups, comm, lr=plan.learning_rate)
    return OneBitAdam(groups, lr=plan.learning_rate, freeze_step=plan.freeze_step, comm=comm)


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices decay; biases and normalisation weights do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
