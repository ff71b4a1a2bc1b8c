"""The optimizer of stage 3: the shards of parameters that FSDP2 leaves on this rank are the home of a
SynchronizedOptimizer, so that the engine and its checkpoints know no difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.compress import FsdpHooks
from thinwire.zero.backward import BackwardWatcher
from thinwire.zero.bucket_layout import model_state_formula
from thinwire.zero.disk import Disk
from thinwire.zero.fsdp import is_sharded, local_run, shelf_of
from thinwire.zero.home import NO_GRADIENTS, Fragment, Held, Home, ParameterState, StepResult, ring_bytes
from thinwire.zero.master_weights import Run
from thinwire.zero.rank_checks import clip_coefficient, refuse_unfrozen
from thinwire.zero.saved_state import STATE_IS_ON_ALL_RANKS, SavedSlice, SliceSource, read_weight
from thinwire.zero.shard_on_disk import ShardOptimizerOnDisk, StepsAhead, check_in_memory, on_disk
from thinwire.zero.shard_optimizer import OptimizerClass, ShardOptimizer
from thinwire.zero.sharded_home import NOT_FINITE, norm_of_averages
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer
from thinwire.zero.tensor_on_disk import TensorOnDisk, mark_of, on_gradient, saved_slice


@dataclass(frozen=True)
class _Shard:
    """Of a parameter, what this rank holds, from element `start` on: `shown`, a flat view of what FSDP2 gathers, and
    `values`, which is stepped: the same, or a copy on another device."""

    name: str
    parameter: Tensor
    group: int
    start: int
    shown: Tensor
    values: Tensor

    @property
    def version(self) -> tuple[int, int]:
        """Changes if the parameter is written, or this rank's part of it."""
        return self.parameter._version, self.shown._version

    def marks(self) -> list[object]:
        """Others if a value of it is written, or its gradient."""
        return [mark_of(self.shown), mark_of(_gradient(self.parameter))]


class FullyShardedOptimizer(SynchronizedOptimizer):
    """Any elementwise torch optimizer on a model that `shard_model` has sharded.

    Checkpoints are those of thinwire.zero.ShardedOptimizer, which can take up what this one saves and the other way
    round; only `state_dict` is not. Gradients of every backward leave at once and add up in their owners' shards.

    Args:
        model: sharded.
        groups: parameter groups of its parameters.
        optimizer_class, options: the torch class and its options.
        comm: the ranks.
        hooks: what the model's collectives go through.
        names: by parameter's id.
        dtype: in which layers are gathered.
        max_norm: the averaged gradient's global norm is clipped to it; 0 does not clip.
        times_mean: how many times the mean over the ranks the wanted gradient is.
        stepped_on: where optimizer state lies, beside a copy of the weights, and is stepped, if not where the shards
            lie: with `pin`, in page-locked memory. disk: a folder in which state rests instead, and is stepped on the
            CPU.
    """

    _home: _FullyShardedHome
    _as_held = staticmethod(lambda group: group)  # its DTensors are shards

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        optimizer_class: OptimizerClass,
        *,
        comm: Communicator,
        hooks: FsdpHooks,
        names: Mapping[int, str],
        dtype: torch.dtype,
        device: torch.device,
        max_norm: float,
        times_mean: float = 1.0,
        stepped_on: torch.device | None = None,
        pin: bool = False,
        disk: Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(groups, optimizer_class([torch.zeros(1)], **options).defaults)
        self.comm = comm
        self.max_norm = max_norm
        shards = []
        for number, group in enumerate(self.param_groups):
            for parameter in (one for one in group["params"] if one.requires_grad):
                start, shown = local_run(parameter)
                values = shown if stepped_on is None else _copy_on(stepped_on, shown, pin)
                shards.append(_Shard(names[id(parameter)], parameter, number, start, shown, values))

        home = _FullyShardedHome(self, model, shards, partial(optimizer_class, **options), hooks, dtype, device, disk)
        self._saved_name = getattr(optimizer_class, "__name__", type(optimizer_class).__name__)
        self._move_in(home, times_mean)

    @property
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """By group's number, this rank's shards of the gradients that have been averaged, flat, in the groups' order;
        times `loss_scale`. Parameters without one have no place."""
        found: dict[int, list[Tensor]] = {number: [] for number in range(len(self.param_groups))}
        for shard in self._home.shards:
            gradient = _gradient(shard.parameter)
            if gradient is not None:
                found[shard.group].append(gradient)
        return found

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer that steps this rank's shards, flat; where it keeps nothing, one without parameters."""
        return self._home.inner.shown()

    def _set_fp32_optimizer_param_groups(self) -> None:
        """What scripts call before they read `optimizer`: nothing has to be put into its groups, shards always are."""

    _clear_fp32_optimizer_param_groups = _set_fp32_optimizer_param_groups

    @override
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError(STATE_IS_ON_ALL_RANKS)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise RuntimeError(STATE_IS_ON_ALL_RANKS)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: {STATE_IS_ON_ALL_RANKS}")


class _FullyShardedHome(Home):
    """Shards of which FSDP2 averages the gradients, and a torch optimizer's step on them."""

    kind = "fully sharded"

    def __init__(
        self,
        optimizer: FullyShardedOptimizer,
        model: Any,
        shards: Sequence[_Shard],
        optimizer_class: OptimizerClass,
        hooks: FsdpHooks,
        dtype: torch.dtype,
        device: torch.device,
        disk: Path | None,
    ) -> None:
        self.comm = comm = optimizer.comm
        self.shards = shards
        self.parameters, self.names = [one.parameter for one in shards], [one.name for one in shards]
        # Of no parameter: FSDP2 averages the gradients of every backward.
        self.watcher = BackwardWatcher(str, lambda: None)
        self.uncompressed_step_bytes = ring_bytes(comm.size, self.parameters)
        self._vote_comm = comm.duplicate()
        self.hooks, self._dtype, self._device = hooks, dtype, device
        self._groups, self._max_norm = optimizer.param_groups, optimizer.max_norm
        self._frozen = [one for group in self._groups for one in group["params"] if not one.requires_grad]
        self.reshard: Callable[[], None] = model.reshard  # has layers read their shards again
        self._shelf = shelf_of(model)
        self._stepped_apart = any(one.values is not one.shown for one in shards)
        self._note_versions()
        self._held = {number: shard for number, shard in enumerate(shards) if shard.values.numel()}
        runs = [Run(number, one.start, slice(0, one.values.numel())) for number, one in self._held.items()]
        values = [one.values for one in self._held.values()]
        given = runs, values, self._groups, [one.group for one in shards], optimizer_class
        self.disk = None if disk is None else Disk(disk, comm)
        self._on_disk = [] if self.disk is None else [on_disk(self.disk, self.names, *given)]
        self.inner = self._on_disk[0] if self._on_disk else ShardOptimizer(*given)
        self._ahead, self._due, self._marks = StepsAhead(), dict[int, Tensor](), dict[int, object]()
        for inner in self._on_disk:
            for run, shard in enumerate(self._held.values()) if inner.can_go_ahead else ():
                on_gradient(shard.parameter, shard.shown, partial(self._step_ahead, inner, run, shard))

    @property
    @override
    def bytes_sent(self) -> int:
        return self.hooks.bytes_sent + self._vote_comm.traffic.bytes_sent

    @override
    def model_state_bytes(self) -> dict[str, float]:
        kinds = {one.kind for one in self._state_slices()}
        elements = sum(one.parameter.numel() for one in self.shards if not isinstance(one.shown, TensorOnDisk))
        vectors = sum(not kind.startswith("scalar.") for kind in kinds) if self.disk is None else 0
        return model_state_formula(
            3, elements, self.comm.size, element_bytes=self._dtype.itemsize, state_bytes=4 * vectors
        )

    @override
    def parameter_state(self) -> ParameterState:
        return _ShardState(self)

    @override
    def close(self) -> None:
        self._vote_comm.close()
        if self.disk is not None:
            self.disk.close()

    @override
    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """FSDP2 sends nothing of layers that have no gradients."""

    @override
    def before_first_backward(self, callback: Callable[[], None]) -> None:
        callback()  # nothing has to be found out in a backward

    # One step

    @override
    def step(self) -> StepResult:
        if any(one.requires_grad for one in self._frozen):
            refuse_unfrozen(self._frozen)
        gradients = [_gradient(shard.parameter) for shard in self.shards]
        there = [one.rest.norm if isinstance(one, TensorOnDisk) else one for one in gradients if one is not None]
        norm, _ = norm_of_averages(self._vote_comm, there, self._groups, self.steps, self._device)
        norm /= self.loss_scale
        finite = math.isfinite(norm)
        applied = finite and bool(there)
        coefficient = clip_coefficient(self._max_norm, norm) / self.loss_scale
        if applied:
            self.watcher.turn.moving = True
            self.steps += 1
            self._apply(gradients, coefficient)
            self.hooks.weights_stepped()
        else:
            self.hooks.drop_residuals()
        self._ahead.end_step(self._on_disk, applied and coefficient == 1.0 / self.loss_scale)
        self._due.clear()
        come: set[int] = set()
        for run in self._ahead.following.values():
            come.add(run)
            self._on_disk[0].expect(come, [run])
        self.reshard()  # what a forward without backward has left gathered is out of date
        return StepResult(applied, norm, "" if applied else NO_GRADIENTS if finite else NOT_FINITE)

    @override
    def drop(self) -> None:
        super().drop()
        self._ahead.drop(self._on_disk)
        self._due.clear()

    def _step_ahead(self, inner: ShardOptimizerOnDisk, run: int, shard: _Shard, gradient: Tensor) -> None:
        """Step what is of this shard beside, if its averaged gradient is likely to be the step's."""
        inner.forget(run)
        if self._ahead.due(run):
            on_disk = isinstance(shard.shown, TensorOnDisk)
            gradients = {} if on_disk else self._due  # of which several make a piece
            gradients[run] = gradient
            self._marks[run] = shard.marks()
            inner.step_ahead(gradients, 1.0 / self.loss_scale, [run], uses_up=on_disk)

    def _apply(self, gradients: list[Tensor | None], coefficient: float) -> None:
        self._take_over_written()
        for inner in self._on_disk:
            for run, shard in enumerate(self._held.values()):
                if self._marks.get(run) != shard.marks():
                    inner.forget(run)
            inner.is_ahead(coefficient)
        for gradient in gradients if coefficient != 1.0 else ():
            if isinstance(gradient, TensorOnDisk):
                gradient.rest.scale(coefficient)
            elif gradient is not None:
                gradient.mul_(coefficient)
        held = [(shard, gradients[number]) for number, shard in self._held.items()]
        if self.disk is not None:
            self.disk.ring.expect(self.inner.files)
        self.inner.step([None if one is None else one.to(shard.values.device) for shard, one in held])
        if self.disk is not None:
            self.disk.finish()
        if self._shelf is not None:
            self._shelf.end_step()
        self._show(shard for shard, gradient in held if gradient is not None)

    # Checkpoints

    @override
    def saved_slices(self) -> list[SavedSlice]:
        """Master weights only if layers are gathered in 16 bits."""
        self._take_over_written()
        slices = []
        for shard in self._held.values():
            slices.append(saved_slice("weight", shard.name, shard.start, shard.values, self._dtype))
            if self._dtype != torch.float32:
                slices.append(saved_slice("master", shard.name, shard.start, shard.values))
        return slices + self._state_slices()

    def _state_slices(self) -> list[SavedSlice]:
        cuts = ((number, slice(0, one.values.numel())) for number, one in enumerate(self._held.values()))
        return self.inner.saved_slices(self.names, cuts)

    @override
    def load(self, source: SliceSource) -> None:
        self.load_weights(source)
        self.inner.load(source, self.names)

    @override
    def load_weights(self, source: SliceSource) -> None:
        self.reshard()
        self.hooks.reset()
        for shard in self.shards:
            shard.values.copy_(read_weight(source, torch.float32, shard.name, shard.start, shard.values.numel()))
        self._show(self.shards)

    @override
    def reset_state(self) -> None:
        self.inner.reset()

    # Parts

    def _show(self, shards: Iterable[_Shard]) -> None:
        """Have FSDP2 gather what is stepped elsewhere."""
        if self._stepped_apart:
            for shard in shards:
                shard.shown.copy_(shard.values)
            self._note_versions()

    @torch.no_grad()
    def _take_over_written(self) -> None:
        """Have what is stepped elsewhere follow what was written into the parameters."""
        if self._stepped_apart:
            for shard, version in zip(self.shards, self._versions, strict=True):
                if shard.version != version:
                    shard.values.copy_(shard.shown)
            self._note_versions()

    def _note_versions(self) -> None:
        self._versions = [shard.version for shard in self.shards] if self._stepped_apart else []


class _ShardState(ParameterState):
    cuts_parameters = True

    def __init__(self, home: _FullyShardedHome) -> None:
        self.comm = home.comm
        self._home = home

    @override
    def parameter(self, number: int) -> Tensor:
        return self._home.parameters[number]

    @override
    def weights(self, number: int) -> Held:
        return self._held(self.parameter(number))

    @override
    def after_writing_weights(self, number: int, value: Tensor | None) -> None:
        self._home.reshard()  # layers are gathered from the shards
        self._home.hooks.weights_stepped()

    @override
    def state(self, number: int, kind: str) -> Held:
        return Held(self._home.inner.fragments(number, kind), self.comm.size == 1, known=kind in self.kinds())

    @override
    def check_may_write_state(self, kind: str) -> None:
        check_in_memory(self._home.disk, kind)

    @override
    def gradient(self, number: int) -> Held | None:
        gradient = self.parameter(number).grad
        return None if gradient is None else self._held(gradient)

    @override
    def after_writing_gradient(self, number: int) -> None:
        """Do nothing: steps find everything out from the shards."""

    @override
    def kinds(self) -> list[str]:
        return sorted(self._home.inner.kinds())

    def _held(self, sharded: Tensor) -> Held:
        start, values = local_run(sharded)
        whole = not is_sharded(sharded)  # an empty parameter, which is not cut
        return Held([Fragment(start, values)], everywhere=whole or self.comm.size == 1)


def _copy_on(device: torch.device, shown: Tensor, pin: bool) -> Tensor:
    copied = shown.detach().to(device, copy=True)
    return copied.pin_memory() if pin and device.type == "cpu" and shown.device.type != "cpu" else copied


def _gradient(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else local_run(parameter.grad)[1]
