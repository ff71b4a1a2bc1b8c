"""One training loop for every experiment: the same data and weights, one learner or the other."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from experiments.training.learners import Learner
from experiments.training.plans import Plan
from thinwire.comm import Communicator
from thinwire.simd import compiling

__all__ = ["Curve", "Outcome", "StepReport", "Task", "Trainer"]

Model = TypeVar("Model", bound=nn.Module)


class Task(Protocol[Model]):
    """What is learned: a model, and losses as functions of (seed, step, rank) only."""

    def build_model(self, seed: int) -> Model:
        """A model whose weights depend on the seed only."""

    def training_loss(self, model: Any, seed: int, step: int, rank: int, ranks: int) -> Tensor:
        """Mean loss of the batch that this rank takes at this step, with its graph; `model` is called like one."""

    def validation_sum(self, model: Any, rank: int, ranks: int) -> tuple[float, int]:
        """Summed loss of the held-out examples that fall to this rank, and how many they are."""


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
        bytes_sent: by this rank in this step, for gradients, weights or momentum.
        stage: as in `Learner`.
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
        bytes_sent: by one rank in the whole run, for gradients, weights or momentum.
        last_step_bytes: by one rank in the last step.
        frozen_at: the step at which a 1-bit optimizer froze its variance; None if it did not.
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

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Outcome:
        """From what `asdict` made of it and a JSON file holds, in which null stands for a loss that was not finite."""
        losses = [_loss(loss) for loss in record["curve"]["losses"]]
        curve = Curve(**{**record["curve"], "losses": losses})
        return cls(**{**record, "final_loss": _loss(record["final_loss"]), "curve": curve})


class Trainer:
    """Has a learner learn a task, a step at a call, and keeps its curve."""

    def __init__(self, task: Task[Any], plan: Plan, learner: Learner, comm: Communicator) -> None:
        """Takes a learner whose model is the task's, made from the plan's seed, over all ranks of `comm`."""
        self.task = task
        self.plan = plan
        self.learner = learner
        self.comm = comm
        self.step = 0
        self.bytes_sent = 0
        self.step_bytes = 0
        self.seconds = 0.0
        self.curve = Curve()
        compiling.wait()  # once on a machine, and of no optimizer's speed

    @property
    def finished(self) -> bool:
        """Whether every planned step is done."""
        return self.step >= self.plan.steps

    @property
    def outcome(self) -> Outcome:
        """What the results say about this run, once it is finished."""
        return Outcome(
            seed=self.plan.seed,
            parameters=sum(parameter.numel() for parameter in self.learner.module.parameters()),
            final_loss=self.curve.losses[-1],
            bytes_sent=self.bytes_sent,
            last_step_bytes=self.step_bytes,
            frozen_at=self.learner.frozen_at,
            seconds=round(self.seconds, 1),
            curve=self.curve,
        )

    def advance(self) -> StepReport:
        """Does one step on every rank, and validates when it is time to."""
        started = time.perf_counter()
        sent_before = self.learner.bytes_sent
        loss = mean([self._learn(micro_batch) for micro_batch in range(self.learner.micro_batches)])
        self.step += 1
        self.step_bytes = self.learner.bytes_sent - sent_before
        self.bytes_sent += self.step_bytes
        validation_loss = self._record() if self.plan.is_validated_after(self.step) else None
        self.seconds += time.perf_counter() - started
        return StepReport(self.step, loss, self.step_bytes, self.learner.stage, validation_loss)

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
        with self.learner.evaluating(), torch.no_grad():
            total, count = self.task.validation_sum(self.learner, self.comm.rank, self.comm.size)
        sums = torch.tensor([total, count], dtype=torch.float64)
        self.comm.all_reduce(sums)
        return float(sums[0] / sums[1])

    def _learn(self, micro_batch: int) -> float:
        batch = self.step * self.learner.micro_batches + micro_batch
        loss = self.task.training_loss(self.learner, self.plan.seed, batch, self.comm.rank, self.comm.size)
        self.learner.learn(loss)
        return loss.item()

    def _record(self) -> float:
        loss = self.validate()
        self.curve.steps.append(self.step)
        self.curve.bytes_sent.append(self.bytes_sent)
        self.curve.losses.append(loss)
        return loss


def _loss(recorded: float | None) -> float:
    return math.nan if recorded is None else recorded
