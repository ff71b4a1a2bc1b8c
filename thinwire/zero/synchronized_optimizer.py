"""The one surface of every optimizer that synchronises by itself, whatever its algorithm and its state's home."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from threading import get_ident
from typing import Any, Self, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire.comm import Communicator
from thinwire.comm.agreement import on_every_rank
from thinwire.comm.errors import fork_error
from thinwire.zero import rank_state, saved_state, training_loops
from thinwire.zero.home import NOT_STEPPED, TRAFFIC, Home, StepResult, claim, refuse_other_parameters, ring_bytes
from thinwire.zero.replica import local_part, local_parts
from thinwire.zero.saved_state import SavedSlice, SliceSource


class SynchronizedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose gradients leave during `backward()`, and whose `step()` is the same on every rank.

    A subclass makes its home, `_home`, and calls `_move_in`. `comm`: the ranks. `max_norm`: the averaged gradient's
    2-norm is clipped to it; 0 does not clip. `last_step`: what became of the last step. `skipped_steps`: steps skipped
    because a gradient was not finite. `bytes_uncompressed`: what a ring all-reduce of the gradients in the parameters'
    own dtype would have sent for the same steps. `loss_scale_config`, `loss_scaler`: an engine's loss scale, or None.
    `dynamic_loss_scale`: whether that follows from overflows. `summed`: micro-batches that gradients are sums over
    where a mean is wanted, from the next `loss_scale` on. `in_training`: false after `eval`. `steps_alone`: whether a
    worker may skip a step that others take. `comes_and_goes`: whether it may join late: `steps` alone counts its steps.
    `replica`: the ranks that together hold one of the model, where it takes several.
    """

    # GradScaler then passes its scale in and leaves the unscaling to step().
    _step_supports_amp_scaling = True

    comm: Communicator
    max_norm: float
    loss_scale_config: Any = None
    loss_scaler: Any = None
    dynamic_loss_scale: bool = False
    in_training: bool = True
    steps_alone: bool = False
    comes_and_goes: bool = False
    _as_held = staticmethod(local_parts)
    _home: Home
    _saved_name: str = ""  # in checkpoints, by default the class's

    def _move_in(self, home: Home, times_mean: float = 1.0) -> None:
        """Begin at step 0 in `home`; gradients are `times_mean` the mean over the ranks."""
        self._home, self.replica = home, home.replica
        home.watcher.seal.warns = home.comm.rank == 0
        self._turn, alone = home.watcher.turn, home.comm.size == 1 and not self.comes_and_goes
        self._turn.alone, self._process = alone, None if alone else os.getpid()
        self._saved_name = self._saved_name or type(self).__name__
        self._times_mean, self.summed = times_mean, 1
        self.loss_scale = 1.0
        self._groups, self._held = self.param_groups, sum(len(group["params"]) for group in self.param_groups)
        self.last_step: StepResult = NOT_STEPPED
        self.skipped_steps = self.bytes_uncompressed = 0
        self._bytes_before_resume = 0
        self._attached = False
        self._ddp_hook: RemovableHandle | None = None
        if home.comm.size > 1 and torch.distributed.is_available() and torch.distributed.is_initialized():
            self._ddp_hook = training_loops.on_first_ddp_forward(home.parameters, self._attach_to)
        home.before_first_backward(self._begin_training)
        claim(home, home.parameters)

    # What it reports

    @property
    def steps(self) -> int:
        """Steps applied."""
        return self._home.steps

    @property
    def frozen_at(self) -> int | None:
        """The step after which the first parameters' steps were compressed; None before, and where none ever are."""
        return self._home.frozen_at

    @property
    def in_sync(self) -> bool:
        """Whether all ranks hold the same weights: always, but between the syncs of algorithms with local steps."""
        return self._home.in_sync

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to synchronise steps, headers, scales and padding included."""
        return self._bytes_before_resume + self._home.bytes_sent

    @property
    def bytes_sent_between_nodes(self) -> int:
        """The part of them that left this rank's node, since this object was made."""
        return self._home.bytes_sent_between_nodes

    @property
    def loss_scale(self) -> float:
        """What gradients are times; set it before backward(). A GradScaler sets it by itself."""
        return self._home.loss_scale * self._home.taken

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._home.taken = self._times_mean / self.summed
        self._home.loss_scale = scale / self._home.taken  # it divides means by that

    cur_scale = loss_scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite, on whichever rank."""
        return self.last_step.overflow

    def model_state_bytes(self) -> dict[str, float]:
        """Bytes that this rank should hold of weights, master weights, gradients, residuals and optimizer state."""
        return self._home.model_state_bytes()

    # What a training loop calls

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply this step's synchronised gradients, or skip it on every rank; see `last_step`. Collective.

        Raises RuntimeError where gradients were changed after backward() or after `eval()`, ValueError where a
        parameter has a gradient on some ranks only and the algorithm needs it on all, and CommunicationError where a
        rank failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._process not in (None, os.getpid()):
            raise fork_error(self._process)
        if self._turn.thread or self._turn.cut_short:
            self._turn.check("step()")
        if not self.in_training:
            raise RuntimeError("step() was called after eval(): call optimizer.train() first")
        if self.comes_and_goes and self.last_step is NOT_STEPPED:
            training_loops.refuse_trainers()
        if self.param_groups is not self._groups:  # replaced, while home and inner optimizers hold the list itself
            self._groups[:] = self.param_groups
            self.param_groups = self._groups
        held = 0
        for group in self._groups:
            held += len(group["params"])
        if self._home.superseded or held != self._held:
            refuse_other_parameters(type(self).__name__, self._home.superseded)
        self._take_scale()
        self._turn.thread, self._turn.call, self._turn.moving = get_ident(), "step()", False
        try:
            self.last_step = self._home.step()
        except BaseException as error:
            self._turn.fail(error)
            raise
        self._turn.thread, self._turn.moving = 0, False
        skipped = "NaN" in self.last_step.reason
        if self.last_step.applied or skipped:
            self.bytes_uncompressed += self._home.uncompressed_step_bytes
        self.skipped_steps += skipped
        if skipped:
            training_loops.warn_of_skipped(self, alone=self.steps_alone)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients. Between backward() and step() this drops the step: do it on every rank or none."""
        if self._turn.thread or self._turn.cut_short:
            self._turn.check("zero_grad()")
        cut_short, self._turn.thread, self._turn.call = self._turn.cut_short, get_ident(), "zero_grad()"
        try:
            self._home.drop() if not cut_short else self._home.end_step()
            super().zero_grad(set_to_none)
        except BaseException as error:
            self._turn.fail(error)
            raise
        self._turn.thread, self._turn.cut_short = 0, ""

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradient accumulation: backwards inside only add up; the first one outside sends the sum."""
        return self._home.watcher.no_sync()

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Promise, before a synchronised backward, that no rank's reaches these: `drop.dropped_parameters()`.

        Buckets of nothing else are not sent; other buckets do not wait for them. Left out of a whole step the
        parameters are left alone until compression begins; after it their gradients count as zero. Collective. Raises
        ValueError, on every rank, where ranks leave out different parameters or one has a gradient already, and
        RuntimeError where the algorithm takes steps that send nothing.
        """
        self._home.leave_out(map(local_part, parameters))

    def end_backward(self) -> None:
        """Send what a backward has left unsent, once it is over. Collective; `step` does it if no caller did."""
        self._home.end_backward()

    def attach(self, model: nn.Module) -> Self:
        """Take the names of parameters from `model`, for error messages; returns the optimizer.

        From a DistributedDataParallel it also takes gradient synchronisation over: DDP's all-reduce is replaced by
        nothing, and its `no_sync()` is obeyed. One that was not attached is found and attached in the first backward.
        Raises ValueError where the model has trainable parameters that this optimizer does not hold.
        """
        training_loops.check_holds_all(self, model)
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        self._home.name({id(local_part(one)): name for name, one in inner.named_parameters()})
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, training_loops.leave_gradients_alone)
            self._attached = self._home.watcher.seal.written_back = True
            self._home.watcher.gates.append(lambda: bool(model.require_backward_grad_sync))
        return self

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank alike; they warm up and freeze on their own. Raises RuntimeError where state is
        sharded: buckets are laid out once."""
        moved_in, param_group = hasattr(self, "_home"), self._as_held(param_group)
        if moved_in and not self._home.grows:
            self._home.add_parameters()
        super().add_param_group(param_group)
        if moved_in:
            try:
                self._home.add_parameters()
            except (ValueError, TypeError):
                self.param_groups.pop()
                raise
            self._held += len(param_group["params"])
            claim(self._home, self._home.parameters)

    def train(self) -> None:
        """Show this rank's own weights in the parameters again, after `eval`."""
        self.in_training = True
        self._home.show_own_weights(True)

    def eval(self) -> None:
        """Show the weights that all ranks have in common, where ranks' own differ between syncs: for evaluation.

        Nothing is sent. Call `train` before the next forward of training.
        """
        self.in_training = False
        self._home.show_own_weights(False)

    @torch.no_grad()
    def synchronize_weights(self) -> None:
        """Synchronise with the other ranks now, so that all hold the same weights: before a checkpoint of the model, or
        any change of weights. Collective, unless the ranks are in sync already: call it at the same step on every rank.

        Training goes on from there; with local steps not bit for bit. Raises RuntimeError between backward and step.
        """
        if self._process not in (None, os.getpid()):
            raise fork_error(self._process)
        self._home.synchronize_weights()

    def gather_during_forward(self, module: nn.Module) -> None:
        """Let `step` return while new weights are on their way, and wait for each when it is read.

        Read through `module`'s attributes, `parameters()` or `state_dict()` they are always the new ones; before any
        that were kept are read, as in `param_groups`, call `wait_for_weights`. Raises RuntimeError at a second call.
        """
        self._home.gather_during_forward(module)

    def wait_for_weights(self) -> None:
        """Wait until this rank has the last step's weights."""
        self._home.wait_for_weights()

    def close(self) -> None:
        """Release the communicators, on every rank; the optimizer cannot step afterwards. In a fork do nothing."""
        if self._process in (None, os.getpid()):
            self._home.wait_for_weights()
            self._home.close()

    # Checkpoints

    def saved_parameters(self) -> list[tuple[str, Tensor]]:
        """Every parameter that is synchronised, by the name that `saved_slices` gives it."""
        return list(zip(self._home.names, self._home.parameters, strict=True))

    def saved_slices(self) -> list[SavedSlice]:
        """What this rank contributes of weights, master weights and state; the ranks' union holds everything once."""
        return self._home.saved_slices()

    def rank_tensors(self) -> dict[str, Tensor]:
        """What belongs to this rank alone: error-feedback residuals above all."""
        own = self._home.rank_tensors()  # first: it may have to send something
        return {**own, TRAFFIC: torch.tensor([self.bytes_sent, self.bytes_uncompressed], dtype=torch.int64)}

    def counters(self) -> dict[str, Any]:
        """Settings and where the run is, as plain values: the same on every rank."""
        if self._turn.thread or self._turn.cut_short:
            self._turn.check("state_dict()")
        return {
            **saved_state.counters_of(self._saved_name, self.param_groups),
            **self._home.counters(),
            **({} if self.replica is None else {"part": self.replica.place}),
            "skipped_steps": self.skipped_steps,
        }

    def check(self, source: SliceSource) -> None:
        """Raise ValueError where `load` cannot take this up: DamagedStateError where not all is there that it reads."""
        part = None if self.replica is None else self.replica.place
        mine = self._home.counted, self._saved_name, self.param_groups, part
        saved_state.check_counters(source.counters(), *mine)
        self._home.check(source)

    @torch.no_grad()
    def load(self, source: SliceSource) -> None:
        """Take over what `saved_slices`, `rank_tensors` and `counters` gave, of any stage and number of ranks.

        Where the number of ranks differs, every rank's residual becomes the mean of the saved ones, which is all that
        the average over ranks depends on. Collective.

        Raises ValueError, on every rank and before anything moves, for what `check` refuses on any.
        """
        on_every_rank(self.comm, partial(self.check, source), "load its optimizer's state", (ValueError, TypeError))
        saved = source.counters()
        self.zero_grad()
        self._home.load(source)
        if self._times_mean != 1.0:  # what was saved counts the ranks that there were
            self.loss_scale = 1.0
        saved_state.take_over_settings(saved, self.param_groups)
        self.skipped_steps = saved.get("skipped_steps", 0)
        if source.world_size == self.comm.size:
            with suppress(KeyError):  # of another rank's file
                sent, self.bytes_uncompressed = source.read_rank(TRAFFIC, self.comm.rank).tolist()
                self._bytes_before_resume += sent - self.bytes_sent

    @torch.no_grad()
    def load_weights(self, source: SliceSource) -> None:
        """Take over the weights alone, whatever optimizer they were trained with; its own state stays as it is.

        Raises KeyError where a parameter was not saved.
        """
        self.zero_grad()
        self._home.load_weights(source)

    def reset_state(self) -> None:
        """Forget moments, residuals and step counts, on every rank: the optimizer is as new, the weights and settings
        stay."""
        self.zero_grad()
        self._home.reset_state()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, error-feedback residuals included: every rank saves its own.

        Beside torch's `param_groups` there is `thinwire`, with the counters, what belongs to this rank alone and, where
        state is sharded, this rank's slices of it. Where every rank holds all of the state, torch's `state` has it.
        """
        counters, rank_tensors, slices = self.counters(), self.rank_tensors(), self._home.saved_slices()
        packed = {**super().state_dict(), "state": self._home.torch_state()}
        return rank_state.add_to(packed, self._home, counters, slices, rank_tensors)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank; training then goes on bit for bit. Collective.

        Hyperparameters are its `param_groups`', edited or not. From another stage, every rank gives its own file. With
        another number of ranks than saved it takes the state of a rank that held all of it; residuals then start again
        from zero, with a warning. Raises ValueError, on every rank and before anything moves, where the state is
        another optimizer's or model's, or more than settings were changed in it.
        """
        name, groups = type(self).__name__, self.param_groups
        self.load(rank_state.rank_state_source(self._home, groups, state_dict, name))

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"a {type(self).__name__} {saved_state.NO_COPIES}")

    # Parts

    def _begin_training(self) -> None:
        """Look for no more wrappers, and follow who adds gradients up."""
        if self._ddp_hook is not None:
            self._ddp_hook.remove()
            self._ddp_hook = None
        if (sends_now := training_loops.find_accumulation()) is not None:
            self._home.watcher.gates.append(sends_now)

    def _attach_to(self, model: DistributedDataParallel) -> None:
        """Attach to who would send all gradients once more; warn if it cannot be stopped."""
        if self._attached:
            return
        try:
            self.attach(model)
        except (ValueError, RuntimeError) as error:
            self._home.watcher.seal.written_back = True
            twice = ring_bytes(self.comm.size, [one for one in model.parameters() if one.requires_grad])
            training_loops.warn_of_ddp(type(self).__name__, twice, error)

    def _take_scale(self) -> None:
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        self._home.scaled = grad_scale is not None
        if grad_scale is not None:
            self.loss_scale = float(grad_scale)
        elif getattr(self, "found_inf", None) is not None:
            training_loops.refuse_unscaling()
