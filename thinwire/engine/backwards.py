"""The backwards of one step, those of the engine and those that a user calls on a loss: how they are scaled, and what
has to be known before and after them."""

from __future__ import annotations

import warnings

from torch import Tensor

from thinwire.engine.accumulation import Accumulation
from thinwire.engine.errors import CallError
from thinwire.engine.job import Job
from thinwire.engine.monitoring.losses import StepLosses
from thinwire.engine.no_optimizer import check_trains

__all__ = ["StepBackwards"]


class StepBackwards:
    """`losses`: those that were told of. `accumulation`: where the step stands between its micro-batches.

    A backward of the engine starts from the loss scale over the micro-batches of a step. One that a user calls on a
    plain loss starts from 1: then the optimizer is told that gradients are times the micro-batches.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._optimizer = job.optimizer
        self._warned = False
        self.losses = StepLosses()
        adds_averages = job.config.zero_optimization.stage == 3  # those of each backward, in their owners' shards
        self.accumulation = Accumulation(
            job.config.gradient_accumulation_steps, job.optimizer.no_sync, takes_more=adds_averages
        )

    @property
    def none_yet(self) -> bool:
        """Whether nothing of this step has begun."""
        return self.losses.empty and not self.accumulation.under_way

    def begin(self, loss: Tensor, parts: int | None, retain_graph: bool) -> Tensor:
        """Note a loss and give the gradient that its backward starts from; see StepLosses.start.

        Raises TypeError, ValueError or CallError, before anything is sent.
        """
        optimizer, loss_scale, layer_drop = self._optimizer, self._job.loss_scale, self._job.layer_drop
        check_trains(optimizer, "backward")
        self.losses.check(loss)
        if loss_scale is not None:
            loss_scale.check(loss.dtype)
        self.accumulation.check_backward()
        if self.losses.empty and self.accumulation.micro_batches:
            raise CallError(
                "engine.backward() was called in a step that began with a loss's own backward(), and the two scale "
                "gradients differently: call one or the other in all micro-batches of a step"
            )
        scale = loss_scale.value if loss_scale is not None else 1.0
        optimizer.loss_scale = scale
        start = self.losses.start(loss, scale, parts, retain_graph)
        if layer_drop is not None and not self.accumulation.only_adds_up:
            optimizer.leave_out(layer_drop.dropped_parameters())
        return start

    def take_up(self, parts: int) -> None:
        """Where none of the engine's backwards belongs to the micro-batch that ends, take up gradients that others have
        brought, each times `parts` of what it contributes. Where there are none, whoever ends the micro-batch says so.

        Raises CallError with layer drop.
        """
        ready = self.accumulation.ready or self.accumulation.inside_no_sync
        groups = self._optimizer.param_groups
        if ready or not self.losses.empty or not any(_has_gradient(group["params"]) for group in groups):
            return
        if self._job.layer_drop is not None:
            raise CallError(
                "step() follows a loss's own backward(), and other ranks were not told which layers had been dropped: "
                "call engine.backward(loss), or engine.scale(loss).backward(), with progressive_layer_drop"
            )
        if self._job.loss_scale is not None and not self._warned:
            self._warned = True
            warnings.warn(
                "step() follows the backward() of a loss that was not scaled: in fp16 small gradients are lost to "
                "zero. Call engine.backward(loss), or engine.scale(loss).backward()",
                RuntimeWarning,
                stacklevel=3,
            )
        self._optimizer.loss_scale = float(parts)
        self.accumulation.end_backward()

    def warn_of_a_checkpoint(self, step: int) -> None:
        """Tell, on rank 0, who saves in mid-step that the checkpoint is that of step `step`."""
        if self._job.comm.rank == 0:
            warnings.warn(
                f"save_checkpoint() was called in mid-step, after {self.losses.count} backward() since step {step}, "
                "and saves that step without these gradients. Training goes on with them here, a job that loads it "
                "takes their micro-batches again. Save after a step() at an accumulation boundary to lose no work",
                RuntimeWarning,
                stacklevel=3,
            )

    def forget(self) -> None:
        """Forget the step, which has gone wrong; the optimizer may still have its gradients."""
        self.losses.clear()
        self.accumulation.drop()

    def begin_step(self) -> None:
        """Begin another step, the optimizer having ended this one."""
        self.losses.clear()
        self.accumulation.begin_step()
        if self._job.loss_scale is not None:
            self._optimizer.loss_scale = self._job.loss_scale.value


def _has_gradient(parameters: list[Tensor]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)
