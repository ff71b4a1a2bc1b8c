"""The training loop's three calls, `engine(batch)`, `engine.backward(loss)`, `engine.step()`, over any ZeRO stage,
precision and communicator."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import Tensor, nn

from thinwire.engine.backwards import StepBackwards
from thinwire.engine.job import Job
from thinwire.engine.job_checkpoints import JobCheckpoints, Parts
from thinwire.engine.loss_scale import LossScale, NonFiniteError
from thinwire.engine.model import warn_of_another_size
from thinwire.engine.optimizers import NoOptimizer
from thinwire.engine.parts import spans_of_parts
from thinwire.engine.recipe import move_schedule
from thinwire.engine.reports import JobReports, StepSummary
from thinwire.zero.fsdp import Preparation
from thinwire.zero.rank_checks import broadcast_from_rank_0

_PROGRESS = ("global_steps", "global_samples", "skipped_steps")
_CHANGES_A_MODEL = {"bfloat16", "cpu", "cuda", "double", "float", "half", "to", "to_empty", "type"}
_CHANGES_A_MODEL |= {"load_state_dict", "requires_grad_"}
"""A model's methods that its optimizer, which holds the weights too, would not follow."""


class Engine:
    """A model in training.

    Call it like the model. Every micro-batch is `loss = engine(batch)`, `engine.backward(loss)`, `engine.step()`; the
    weights move at every `gradient_accumulation_steps`-th step(), on all ranks together. Attributes that the engine
    lacks are the model's; an nn.Module itself is `module`, which the engine is not.

    `module`, `optimizer`, `lr_scheduler`, `training_dataloader`, `device`: what it works with; `optimizer` is None
    where the engine evaluates only. `settings`: the loaded configuration. `global_steps`: taken or skipped so far;
    `skipped_steps` of them moved nothing. `global_samples`: seen in them by all ranks, every micro-batch counted as a
    full one. `micro_steps`: micro-batches so far. `comm`: the ranks that take other data. `mesh`: its dimensions are
    "pp", "dp" and "tp"; None where every rank has all of the model. `loss_scaler`: fp16's loss scale, else None.
    `loaded_checkpoint_dp_world_size`: ranks that saved the checkpoint that was loaded last. `monitor`: takes scalars of
    your own, `engine.monitor.write_events([(name, value, engine.global_samples)])`. `flops_profiler`: of the step that
    the configuration names, else None.
    """

    prepared: ClassVar[Preparation] = Preparation()  # what models that it is given may have noted on them

    def __init__(self, job: Job, checkpoints: JobCheckpoints, reports: JobReports) -> None:
        self._job = job
        self._module = job.model
        self._optimizer = job.optimizer
        self.optimizer = None if isinstance(job.optimizer, NoOptimizer) else job.optimizer
        self.lr_scheduler = job.schedule
        self.training_dataloader = job.loader
        self.settings = job.config
        self.comm = job.comm
        self.mesh = job.mesh
        self.device = job.device
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = self.micro_steps = 0
        self.loaded_checkpoint_dp_world_size: int | None = None
        self.loss_scaler: LossScale | None = job.loss_scale
        self._grad_norm: float | None = None
        self._precision = job.precision
        self._layer_drop = job.layer_drop
        self._checkpoints = checkpoints
        self._reports = reports
        self._span = spans_of_parts(reports.span, job.mesh)
        self.monitor = reports.monitor
        self.flops_profiler = reports.flops_profiler
        self._backwards = StepBackwards(job)
        self._accumulation = self._backwards.accumulation
        self._losses = self._backwards.losses
        self._applied = False
        self._seen_batch = False
        self._backwards.begin_step()
        self._data_position = self._position_of_data()  # as of the last step
        self._scheduled = 0  # steps of an elastic job's schedule
        if self._optimizer.comes_and_goes:  # a worker that joins begins where the others are
            self.global_steps = self._optimizer.steps
            self._scheduled = move_schedule(self.lr_scheduler, 0, self.global_steps, {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, tensors among the inputs moved to its device and, floating-point ones, to its dtype."""
        if self._module.training and not self._accumulation.inside_no_sync and not self._seen_batch:
            warn_of_another_size((args, kwargs), self.settings.train_micro_batch_size_per_gpu, self.comm.rank)
            self._seen_batch = True
        with self._span("forward"):
            args, kwargs = self._precision.place((args, kwargs), self.device)
            if self._layer_drop is not None and self._module.training:
                kwargs = {**kwargs, **self._layer_drop.begin_step(self.global_steps)}
            return self._module(*args, **kwargs)

    forward = __call__

    # One step

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute gradients of `loss`, one value, and average them over the ranks at the accumulation boundary.

        The loss is divided by `gradient_accumulation_steps`, and so it is returned, without a graph where that changes
        it; in fp16 it is multiplied by the loss scale for this only. Without `scale_wrt_gas` it is not
        divided: it is this micro-batch's share of the step's loss already. With `retain_graph` another backward can go
        through the same graph. Collective at the boundary.

        Several backwards may add up before one step(), as long as no gradients have left: before the boundary, or
        inside no_sync(); at stage 3 always.

        Raises TypeError, ValueError or CallError, before anything is sent, for what is no new loss, where gradients
        have left since the last step(), or where there is no optimizer.
        """
        parts = self.settings.gradient_accumulation_steps if scale_wrt_gas else None
        start = self._backwards.begin(loss, parts, retain_graph)
        with self._span("backward"):
            loss.backward(start, retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            self._optimizer.end_backward()
        self._accumulation.end_backward()
        return loss if parts is None or parts == 1 else loss.detach() / parts

    def scale(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        """What to call backward() on in your own code: `engine.scale(loss).backward()` is `engine.backward(loss)`.

        `loss` times fp16's loss scale, over `gradient_accumulation_steps`. In fp32 and bf16, `loss.backward()` will do
        too, and engine(batch) is not even needed; then no loss is logged. Raises what `backward` raises.
        """
        start = self._backwards.begin(loss, self.settings.gradient_accumulation_steps, retain_graph)
        self._accumulation.end_backward()
        return loss * start

    def end_backward(self) -> None:
        """Send what a backward that was not the engine's has left unsent; step() does it otherwise. Collective at the
        boundary."""
        self._optimizer.end_backward()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at the accumulation boundary clip, move the weights, and forget the gradients. Collective.

        In fp16, a step whose gradients overflow is skipped on every rank; with DiLoCo in any precision, by that worker
        alone, with a warning. `lr_kwargs`: for the schedule's step.

        Raises CallError without a backward; NonFiniteError, on every rank, for a loss or gradient that is not finite in
        fp32 or bf16, or in fp16 at the smallest loss scale from stage 1 on: no weight has moved, and the next
        micro-batch begins another step.
        """
        if isinstance(self._optimizer, NoOptimizer):
            self._optimizer.refuse("step")
        if not self._accumulation.ready:
            self._backwards.take_up(self.settings.gradient_accumulation_steps)
        last = self._accumulation.end_micro_batch()
        self._applied = False
        self.micro_steps += 1
        if not last:
            return
        try:
            failure = self._take_step(lr_kwargs or {})
        except BaseException:
            self._backwards.forget()
            raise
        self._begin_step()
        if failure is not None:
            raise failure

    def zero_grad(self) -> None:
        """Drop the step in flight, as after a backward that failed; on every rank or none. step() does it by itself."""
        self._optimizer.zero_grad()
        self._module.zero_grad()  # parameters that no optimizer holds
        self.micro_steps -= self._accumulation.micro_batches
        self._begin_step()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside only add up, beyond what `gradient_accumulation_steps` does; they take no step().

        At every stage, and nested as you like; from stage 2 on their gradients leave all the same. Raises CallError
        between the last backward of a step and its step().
        """
        return self._accumulation.no_sync()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the step() that ends the current micro-batch moves the weights."""
        return self._accumulation.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide it yourself, before backward() and alike on every rank; None leaves it to the count again.

        With False, several backwards may come before one step(). Raises CallError where gradients have left already.
        """
        self._accumulation.set_boundary(is_boundary)

    # The model

    def __getattr__(self, name: str) -> Any:
        if name == "_module":  # not there yet: do not look for it in itself
            raise AttributeError(name)
        only_evaluates = self.optimizer is None and self.settings.zero_optimization.stage < 3
        if name in _CHANGES_A_MODEL and not (name == "load_state_dict" and only_evaluates):
            raise AttributeError(
                f"an engine has no {name}(): its optimizer holds the weights too, and would not follow. Call it on the "
                "model before thinwire.initialize, or load a checkpoint"
            )
        return getattr(self.module, name)

    @property
    def module(self) -> nn.Module:
        """The model, all its weights there: with `overlap_comm` reach them through this, or through forward."""
        self._optimizer.wait_for_weights()
        return self._module

    def train(self, mode: bool = True) -> nn.Module:
        """Put the model into training mode, or, on all ranks at the same step, into evaluation mode: see `eval`."""
        if self._optimizer.steps_alone or self._optimizer.comes_and_goes:
            (self._optimizer.train if mode else self._optimizer.eval)()
        elif not mode:
            self._optimizer.synchronize_weights()
            norms = [one for one in self._module.modules() if getattr(one, "running_mean", None) is not None]
            broadcast_from_rank_0(self.comm, [one for norm in norms for one in norm.buffers(recurse=False)])
        return self.module.train(mode)

    def eval(self) -> nn.Module:
        """Put the model into evaluation mode, with the same weights on every rank, and rank 0's means of a BatchNorm.

        Collective with a BatchNorm, and with ZeroOneAdam between two of its syncs, and then a sync more. With DiLoCo
        the model has the outer weights until `train`, and nothing is sent. Returns the model.
        """
        return self.train(False)

    # The last step

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the last step's averaged gradient before clipping; None if it is not known.

        That is before the first step, without clipping once 1-bit Adam is frozen, since no rank sees the whole average,
        and with 0/1 Adam. With DiLoCo it is of this rank's worker.
        """
        return self._grad_norm

    def was_step_applied(self) -> bool:
        """Whether the last step() moved the weights."""
        return self._applied

    # Checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save all that training depends on, for any number of ranks and any ZeRO stage. Collective.

        Args:
            save_dir: on a file system that all ranks share.
            tag: the checkpoint's name, by default "global_step" and the number; rank 0's where ranks give several.
            client_state: what you want back from `load_checkpoint`: a dict of numbers, texts, tensors, numpy's numbers
                and arrays, and lists, tuples and dicts of them. Rank 0's is saved.
            save_latest: name this checkpoint in the file `latest`, which says what is loaded without a tag.
            exclude_frozen_parameters: leave out what requires no gradient; a model that loads this keeps its own.

        Returns whether it is saved, or with async_save whether saving has begun. Where the disk is full, say, it is
        not: rank 0 warns, the earlier checkpoints stay, and training goes on.

        In the middle of a step it is the checkpoint of the last step(): gradients since then go on here, are not in it,
        and a job that loads it takes their micro-batches again. Rank 0 warns of that.

        Raises TypeError for a client state of other objects, TypeError or ValueError for no folder or tag.
        """
        position = self._position_of_data()
        if self._in_mid_step:
            self._backwards.warn_of_a_checkpoint(self.global_steps)
            position = self._data_position
        progress = {name: getattr(self, name) for name in _PROGRESS}
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        return self._checkpoints.save(
            save_dir,
            name,
            progress,
            client_state,
            position,
            latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
        )

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., object] | None = None,
        load_data_position: bool = True,
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from a checkpoint, the newest whole one without a `tag`; returns (its path, its client state).

        (None, {}) where there is none. Without `load_optimizer_states` the optimizer starts afresh, without
        `load_lr_scheduler_states` or `load_data_position` the schedule or the data loader goes on as it is;
        `load_module_only` loads weights and buffers and nothing else. Without `load_module_strict`, parameters that the
        checkpoint lacks keep their values, and what the model lacks is passed over. Gradients of a step in flight are
        dropped. Collective.

        `custom_load_fn` loads the weights in the engine's place: it is called with `src`, the checkpoint's weights and
        buffers by name, and `dst`, the model, and writes to its parameters; not at stage 3.

        Raises CheckpointError where no checkpoint is whole, or the model is another; ValueError where the optimizer,
        the schedule or the order of the data is.
        """
        states = load_optimizer_states, load_lr_scheduler_states, load_data_position
        parts = Parts(*states, load_module_only, load_module_strict, custom_load_fn)
        restored = self._checkpoints.load(load_dir, None if tag is None else str(tag), parts)
        if restored is None:
            return None, {}
        found, state = restored
        self._begin_step()
        self.loaded_checkpoint_dp_world_size = found.world_size
        if not load_module_only:
            for name in _PROGRESS:
                setattr(self, name, found.shared["progress"][name])
            self._scheduled = self.global_steps
            # Accumulation may be configured otherwise now; checkpoints lie on boundaries.
            self.micro_steps = self.global_steps * self.settings.gradient_accumulation_steps
            self._reports.steps = self.global_steps
            if self._layer_drop is not None:
                self._layer_drop.resume(self.global_steps)
        return str(found.path), state

    def whole_state_dict(self) -> dict[str, Tensor]:
        """The whole model's weights, in the dtype it computes in, and buffers, on rank 0's CPU; empty on other ranks.

        Parameters that are the same tensor are there once. Collective.
        """
        return self._checkpoints.whole_weights()

    def close(self) -> None:
        """Wait for checkpoints that are being written, close logs, let communicator and model go. Collective."""
        self._losses.look_at_applied()
        self._checkpoints.close()
        self.monitor.close()
        self._optimizer.close()
        if self._layer_drop is not None:
            self._layer_drop.remove()
        if self._job.recomputed is not None:
            self._job.recomputed.restore()

    @property
    def _in_mid_step(self) -> bool:
        """Whether something of a step has begun."""
        return bool(self._losses.count or self._accumulation.ready or self._accumulation.micro_batches)

    def _begin_step(self) -> None:
        self._backwards.begin_step()
        self._data_position = self._position_of_data()

    def _position_of_data(self) -> dict[str, Any] | None:
        return None if self._job.loader is None else self._job.loader.state()

    def _take_step(self, lr_kwargs: Mapping[str, Any]) -> NonFiniteError | None:
        """Move the weights; what went wrong where the optimizer has ended the step and training cannot just go on."""
        with self._span("step"):
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._module.zero_grad()  # parameters that no optimizer holds
        outcome = self._optimizer.last_step
        self._applied = outcome.applied
        self._grad_norm = None if outcome.applied and math.isnan(outcome.grad_norm) else outcome.grad_norm
        alone = self._optimizer.steps_alone
        if self._optimizer.comes_and_goes:
            self.global_steps = self._optimizer.steps
            self._scheduled = move_schedule(self.lr_scheduler, self._scheduled, self.global_steps, lr_kwargs)
        else:
            self.global_steps += 1
            if self.lr_scheduler is not None and (outcome.applied or alone):  # else a worker's rate would fall behind
                self.lr_scheduler.step(**lr_kwargs)
        samples = self._accumulation.micro_batches * self.settings.train_micro_batch_size_per_gpu
        self.global_samples += samples * self.comm.size
        self.skipped_steps += not outcome.applied
        done = self.global_steps, self.global_samples, self.skipped_steps
        scale = None if self.loss_scaler is None else self.loss_scaler.value
        summary = StepSummary(*done, self.settings.train_batch_size, self.get_lr(), self._grad_norm, scale)
        self._reports.report(summary, self._losses)
        if self.loss_scaler is None:
            stops = outcome.overflow and not alone and not self.settings.bf16.check_grad_overflow
            return self._losses.not_finite(self._job.world, self.global_steps) if stops else None
        if outcome.applied:
            self._losses.note_applied()
        try:
            self.loss_scaler.update(outcome.overflow)
        except NonFiniteError as failure:
            return failure
        return None
