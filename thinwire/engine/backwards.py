"""The backwards of one step, those of the engine and those that a user calls on a loss: where the step stands between
its micro-batches, which losses it has had, and how gradients are scaled."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.errors import name_ranks
from thinwire.engine.job import Job
from thinwire.engine.loss_scale import NonFiniteError
from thinwire.engine.optimizers import CallError, NoOptimizer


class Accumulation:
    """Counts the micro-batches of a step, of which there are `steps` unless the user has set the boundary; None for as
    many backwards as come before a step().

    While a backward would only add to the gradients it is inside of `hold`, the optimizer's no_sync: so that a backward
    that is not announced, a loss's own, leaves alone what has to stay on this rank.

    `micro_batches`: ended since the last boundary. `at_boundary`: whether the current one is the step's last.
    `takes_more`: whether a backward can add to gradients that have left already.
    """

    def __init__(
        self, steps: int | None, hold: Callable[[], AbstractContextManager[None]], *, takes_more: bool = False
    ) -> None:
        self._steps = steps
        self._takes_more = takes_more
        self._hold = hold
        self._held = ExitStack()
        self._holds = False
        self._boundary: bool | None = None
        self.micro_batches = 0
        self.inside_no_sync = False
        self.ready = False  # whether a backward outside of no_sync has run since the last micro-batch ended
        self._left = False  # and whether its gradients have left
        self._follow()

    @property
    def at_boundary(self) -> bool:
        """Whether the current micro-batch is the step's last."""
        if self._boundary is not None:
            return self._boundary
        return self._steps is not None and self.micro_batches + 1 >= self._steps

    @property
    def only_adds_up(self) -> bool:
        """Whether a backward only adds to the gradients, which stay on this rank."""
        return self.inside_no_sync or not self.at_boundary

    def set_steps(self, steps: int) -> None:
        """Have `steps` micro-batches in a step from now on, where a number decides."""
        self._steps = None if self._steps is None else steps
        self._follow()

    def set_boundary(self, boundary: bool | None) -> None:
        """Say whether the current micro-batch is the step's last; None leaves it to the count.

        Raises CallError where its gradients have left already, or every step() is the boundary.
        """
        if self._steps is None:
            raise CallError(
                'set_gradient_accumulation_boundary() was called, and with "managed_gradient_accumulation" false every '
                "step() is the boundary: leave it out"
            )
        if self._left and boundary is not True:
            raise CallError(
                "set_gradient_accumulation_boundary() was called between the last backward() of a step and its "
                "step(): the gradients have left already. Call it before that backward(), or after step()"
            )
        self._boundary = boundary
        self._follow()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add up, and end no micro-batch. Raises CallError where gradients have left already."""
        if self._left:
            raise CallError(
                "no_sync() was entered between the last backward() of a step and its step(): the gradients have left "
                "already. Call step() first, or put that backward() inside of no_sync() too"
            )
        before, self.inside_no_sync = self.inside_no_sync, True
        self._follow()
        try:
            yield
        finally:
            self.inside_no_sync = before
            self._follow()

    def check_backward(self) -> None:
        """Raise CallError where the step's gradients have left, and another backward could not add to them."""
        if self._left and not self._takes_more:
            raise CallError(
                "backward() was called twice without step(), and the gradients of this step left in the first: call "
                "step() after every backward(), it moves the weights at accumulation boundaries only. With several "
                "losses call backward() on their sum, or put all backwards but the last inside `with engine.no_sync():`"
            )
        self._follow()

    def end_backward(self) -> None:
        """Note that a backward has run."""
        self.ready = self.ready or not self.inside_no_sync
        self._left = not self.only_adds_up
        self.micro_batches += self._steps is None and not self.inside_no_sync

    def end_micro_batch(self) -> bool:
        """Count a micro-batch; whether it was the step's last. Raises CallError where none can end."""
        if self.inside_no_sync:
            raise CallError(
                "It is illegal to call Engine.step() inside no_sync context manager: gradients only add up there. Call "
                "it after the block"
            )
        if not self.ready:
            raise CallError("step() was called without backward(): call engine.backward(loss) first")
        if self._steps is None:  # what only added up leaves with the step
            self._boundary = True
            self._follow()
        last = self.at_boundary
        self.ready = self._left = False
        self.micro_batches += self._steps is not None
        if not last:
            self._follow()
        return last

    def drop(self) -> None:
        """Forget the micro-batches of the step in flight; where the optimizer still has its gradients, it may."""
        self.ready = self._left = False
        self.micro_batches = 0
        if self._steps is None:
            self._boundary = None

    def begin_step(self) -> None:
        """Forget the micro-batches of the step before, or of the one in flight, as the optimizer has."""
        self.drop()
        self._follow()

    def _follow(self) -> None:
        """Hold the optimizer back, or let it go."""
        if self.only_adds_up == self._holds:
            return
        if self._holds:
            self._held.close()
        else:
            self._held.enter_context(self._hold())
        self._holds = not self._holds


_LOOKS_EVERY = 10  # steps on a GPU, where to look is to wait


class StepLosses:
    """The losses that this rank has called backward on since the last step, `count` of them. Nothing here waits for the
    device."""

    def __init__(self) -> None:
        self._last: weakref.ref[Tensor] | None = None
        self._unseen: Tensor | None = None
        self._unseen_steps = 0
        self._warned = False
        self.clear()

    def clear(self) -> None:
        """Start another step."""
        self._sum: Tensor | None = None
        self.count = 0
        self._summed = False

    def check(self, loss: Tensor) -> None:
        """Raise TypeError or ValueError for what backward cannot start from."""
        if not isinstance(loss, Tensor):
            raise TypeError(f"backward() takes the loss that the model returned, a tensor, got {type(loss).__name__}")
        if loss.numel() != 1 or not loss.is_floating_point():
            raise ValueError(
                f"backward() takes a loss of one floating-point value, got {loss.dtype} of shape {tuple(loss.shape)}: "
                "reduce it with .mean()"
            )
        if not loss.requires_grad:
            raise ValueError(
                "the loss has no graph: it was computed under torch.no_grad(), detached, or depends on no parameter "
                "that requires a gradient"
            )
        if self._last is not None and self._last() is loss:
            raise RuntimeError("backward() was called with this loss before: run the model again for a new one")

    def start(self, loss: Tensor, scale: float, parts: int | None, again: bool = False) -> Tensor:
        """Note a loss, and give the gradient that its backward starts from: `scale` / `parts`.

        `parts`: losses whose mean is the step's; None where that is their sum. `again`: its graph is kept, so that it
        may come again.

        NaN for a loss that is not finite, whose gradients might be: with them every rank's average is not finite
        either, so that all of them skip the step without having to ask each other. A loss in fp16 is infinite above
        65504 already, with gradients that are good: there only they decide.
        """
        self._last = None if again else weakref.ref(loss)
        detached = loss.detach()
        value = detached.reshape(()).float()
        self._sum = value if self._sum is None else self._sum + value
        self.count += 1
        self._summed = parts is None
        start = torch.full_like(detached, scale / (parts or 1))
        good = detached.isnan().logical_not_() if detached.dtype == torch.float16 else detached.isfinite()
        return torch.where(good, start, torch.full_like(detached, math.nan))

    def note(self, loss: Tensor) -> None:
        """Note the mean of all ranks' losses in a step."""
        self._sum, self.count = loss.detach().reshape(()).float(), 1

    def note_applied(self) -> None:
        """Note that the step of these losses was taken in fp16, and warn the first time that one of them was infinite:
        at once on a CPU, where every tenth step is looked at together with those before it on a GPU."""
        if self._warned or self._sum is None:
            return
        self._unseen = self._sum if self._unseen is None else self._unseen + self._sum
        self._unseen_steps += 1
        if self._unseen.device.type == "cpu" or self._unseen_steps == _LOOKS_EVERY:
            self.look_at_applied()

    def look_at_applied(self) -> None:
        """Look at the losses that were noted and not looked at yet."""
        if self._unseen is None:
            return
        loss, steps = float(self._unseen), self._unseen_steps
        self._unseen, self._unseen_steps = None, 0
        if not math.isfinite(loss):
            self._warned = True
            of_steps = "of this step" if steps == 1 else f"of one of the last {steps} steps"
            warnings.warn(
                f"the loss {of_steps} is {loss} in fp16, which ends at 65504, and its gradients are finite: such steps "
                "are taken, and what is logged as the loss means nothing. Return the loss in fp32, its mean instead of "
                "its sum, or train in bf16. This is said once",
                RuntimeWarning,
                stacklevel=5,  # of a step()
            )

    def mean(self, comm: Communicator) -> float | None:
        """The mean over micro-batches and ranks; None if no loss was given. Collective."""
        if self._sum is None:
            return None
        mean = (self._sum if self._summed else self._sum / self.count).reshape(1)
        comm.all_reduce(mean, op="mean")
        return float(mean)

    def not_finite(self, comm: Communicator, step: int) -> NonFiniteError:
        """The error of a step that was not finite, which names the ranks whose loss was not. Collective."""
        unknown = self._sum is None
        mine = b"\1" if self._sum is None or bool(self._sum.isfinite()) else b"\0"
        ranks = [
            rank for rank, finite in enumerate(comm.all_gather_bytes(mine, "find infinite losses")) if finite == b"\0"
        ]
        if ranks:
            where = f"the loss was not finite on {name_ranks(ranks)}"
        elif unknown:
            where = "the averaged gradient is not finite"
        else:
            where = "every rank's loss was finite, but the averaged gradient is not"
        return NonFiniteError(
            f"step {step}: {where}. No weight has moved. Look at the data of this step and at the learning rate; "
            "training can go on with the next batch, or from a checkpoint"
        )


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
        managed = job.config.managed_gradient_accumulation and job.pipeline is None
        counted = job.config.gradient_accumulation_steps if managed else None
        self.accumulation = Accumulation(counted, job.optimizer.no_sync, takes_more=adds_averages)

    def begin(self, loss: Tensor, parts: int | None, retain_graph: bool) -> Tensor:
        """Note a loss and give the gradient that its backward starts from; see StepLosses.start.

        Raises TypeError, ValueError or CallError, before anything is sent.
        """
        optimizer, loss_scale, layer_drop = self._optimizer, self._job.loss_scale, self._job.layer_drop
        if isinstance(optimizer, NoOptimizer):
            optimizer.refuse("backward")
        self._refuse_parts("backward")
        self.losses.check(loss)
        if loss_scale is not None:
            loss_scale.check(loss.dtype)
        self.accumulation.check_backward()
        if not self.losses.count and self.accumulation.micro_batches:
            raise CallError(
                "engine.backward() was called in a step that began with a loss's own backward(), and the two scale "
                "gradients differently: call one or the other in all micro-batches of a step"
            )
        scale = loss_scale.value if loss_scale is not None else 1.0
        optimizer.summed, optimizer.loss_scale = 1, scale
        start = self.losses.start(loss, scale, parts, retain_graph)
        if layer_drop is not None and not self.accumulation.only_adds_up:
            optimizer.leave_out(layer_drop.dropped_parameters())
        return start

    def take_up(self, parts: int) -> None:
        """Where none of the engine's backwards belongs to the micro-batch that ends, take up gradients that others have
        brought, each times `parts` of what it contributes. Where there are none, whoever ends the micro-batch says so.

        Raises CallError with layer drop, and with a pipeline.
        """
        self._refuse_parts("step")
        ready = self.accumulation.ready or self.accumulation.inside_no_sync
        groups = self._optimizer.param_groups
        if ready or self.losses.count or all(one.grad is None for group in groups for one in group["params"]):
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
        self._optimizer.summed, self._optimizer.loss_scale = parts, 1.0
        self.accumulation.end_backward()

    def take_pipeline(self, loss: Tensor, parts: int) -> None:
        """Note the mean loss of a step's `parts` micro-batches, whose gradients are all here.

        They are made NaN with a loss that might make them so, as those of `begin` are.
        """
        self.losses.note(loss)
        good = loss.isfinite() if self._job.loss_scale is None else loss.isnan().logical_not()
        gradients = (one.grad for group in self._optimizer.param_groups for one in group["params"])
        for gradient in gradients:
            if gradient is not None:
                local = getattr(gradient, "_local_tensor", gradient)
                local.mul_(torch.where(good, 1.0, math.nan).to(local.dtype))
                break
        for _ in range(parts):
            self.accumulation.end_backward()

    def _refuse_parts(self, call: str) -> None:
        if self._job.pipeline is not None:
            raise CallError(
                f"{call}() was called on one micro-batch, and a pipeline runs all of a step at a time: call "
                "engine.train_batch(iterator), which steps too"
            )

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
            self._optimizer.summed, self._optimizer.loss_scale = 1, self._job.loss_scale.value
