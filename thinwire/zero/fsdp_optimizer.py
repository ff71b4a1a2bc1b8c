"""Steps the shards of parameters that FSDP2 leaves on this rank, with the surface of the other stages' optimizer, so
that the engine and its checkpoints know no difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm import Communicator, Traffic
from thinwire.zero.bucket_layout import model_state_formula
from thinwire.zero.fsdp import ShardState, local_run
from thinwire.zero.home import NOT_STEPPED, ParameterState, StepResult, claim
from thinwire.zero.optimizer import OptimizerClass
from thinwire.zero.rank_checks import check_settings_votes, settings_votes
from thinwire.zero.saved_state import (
    STATE_IS_ON_ALL_RANKS,
    SavedSlice,
    SliceSource,
    check_same_optimizer,
    counters_of,
    group_settings,
    read_state,
    read_weight,
    state_slices,
    take_over_settings,
)

__all__ = ["FullyShardedOptimizer"]


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
        """Changes where somebody writes the parameter, or this rank's part of it."""
        return self.parameter._version, self.shown._version


class FullyShardedOptimizer(torch.optim.Optimizer):
    """Any elementwise torch optimizer on a model that `shard_model` has sharded.

    `last_step`, `loss_scale`, checkpoints: as in thinwire.zero.ShardedOptimizer, which can take up what this one saves
    and the other way round. Gradients of every backward leave at once and add up in their owners' shards.

    Args:
        model: sharded.
        groups: parameter groups of its parameters.
        optimizer_class, options: the torch class and its options.
        comm: the ranks.
        traffic: what counts the bytes that the model sends.
        names: by parameter's id.
        dtype: in which layers are gathered.
        max_norm: the averaged gradient's global norm is clipped to it; 0 does not clip.
        times_mean: how many times the mean over the ranks the wanted gradient is.
        stepped_on: where optimizer state lies, beside a copy of the weights, and is stepped, if not where the shards
            lie: with `pin`, in page-locked memory.
    """

    loss_scale_config: Any = None
    loss_scaler: Any = None
    dynamic_loss_scale: bool = False

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        optimizer_class: OptimizerClass,
        *,
        comm: Communicator,
        traffic: Traffic,
        names: Mapping[int, str],
        dtype: torch.dtype,
        device: torch.device,
        max_norm: float,
        times_mean: float = 1.0,
        stepped_on: torch.device | None = None,
        pin: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(groups, optimizer_class([torch.zeros(1)], **options).defaults)
        self.comm = comm
        self.max_norm = max_norm
        self._times_mean = times_mean
        self.loss_scale = 1.0
        self.last_step = NOT_STEPPED
        self._reshard: Any = model.reshard
        self._vote_comm = comm.duplicate()
        self._steps = 0
        self._traffic = traffic
        self._dtype = dtype
        self._device = device
        self._name = getattr(optimizer_class, "__name__", type(optimizer_class).__name__)
        self._stepped_apart = stepped_on is not None
        self._shards = []
        for number, group in enumerate(self.param_groups):
            for parameter in (one for one in group["params"] if one.requires_grad):
                start, shown = local_run(parameter)
                values = shown if stepped_on is None else _copy_on(stepped_on, shown, pin)
                self._shards.append(_Shard(names[id(parameter)], parameter, number, start, shown, values))
        self._note_versions()
        self._used_groups = sorted({shard.group for shard in self._shards if shard.values.numel()})
        self._build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = lambda groups: optimizer_class(
            groups, **options
        )
        self.reset_state()
        claim(self, [shard.parameter for shard in self._shards])

    @property
    def loss_scale(self) -> float:
        """What gradients are times; set it before backward()."""
        return self._divisor * self._times_mean

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        # Means divided by it are as many times the mean.
        self._divisor = scale / self._times_mean

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to gather parameters and to synchronise steps."""
        return self._traffic.bytes_sent + self._vote_comm.traffic.bytes_sent

    @property
    def cur_scale(self) -> float:
        """The same as `loss_scale`."""
        return self.loss_scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite, on whichever rank."""
        return self.last_step.overflow

    @property
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """By group's number, this rank's shards of the gradients that have been averaged, flat, in the groups' order;
        times `loss_scale`. Parameters without one have no place."""
        found: dict[int, list[Tensor]] = {number: [] for number in range(len(self.param_groups))}
        for shard in self._shards:
            gradient = _gradient(shard.parameter)
            if gradient is not None:
                found[shard.group].append(gradient)
        return found

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer that steps this rank's shards, flat; where it keeps nothing, one without parameters."""
        if self._optimizer is not None:
            return self._optimizer
        return self._build([{**group_settings(one), "params": []} for one in self.param_groups])

    def _set_fp32_optimizer_param_groups(self) -> None:
        """What scripts call before they read `optimizer`: nothing has to be put into its groups, shards always are."""

    _clear_fp32_optimizer_param_groups = _set_fp32_optimizer_param_groups

    def model_state_bytes(self) -> dict[str, float]:
        """Bytes that this rank should hold of the model's state, by category: ZeRO's formula for stage 3."""
        kinds = {one.kind for one in self.saved_slices()} - {"weight", "master"}
        elements = sum(shard.parameter.numel() for shard in self._shards)
        vectors = sum(not kind.startswith("scalar.") for kind in kinds)
        return model_state_formula(
            3, elements, self.comm.size, element_bytes=self._dtype.itemsize, state_bytes=4 * vectors
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add up in the owners' shards."""
        yield

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Nothing has to be told: fully_shard sends no gradients of layers that have none."""

    def end_backward(self) -> None:
        """Nothing is left unsent: FSDP2 has averaged every gradient when backward returns."""

    def synchronize_weights(self) -> None:
        """Nothing: all ranks hold shards of the same weights."""

    def wait_for_weights(self) -> None:
        """Nothing to wait for: this rank's shards are stepped when `step` returns."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Clip, and step this rank's shards, or skip where the average is not finite; collective. See `last_step`."""
        gradients = [_gradient(shard.parameter) for shard in self._shards]
        norm = self._norm(gradients)
        applied = math.isfinite(norm) and any(gradient is not None for gradient in gradients)
        if applied:
            self._apply(gradients, self._clip(norm) / self._divisor)
        self.last_step = StepResult(applied, norm)
        self._steps += 1
        self._reshard()  # what a forward without backward has left gathered is out of date

    def close(self) -> None:
        """Release the communicator, on every rank."""
        self._vote_comm.close()

    def parameter_state(self) -> ParameterState:
        """What this rank holds by parameter; see parameter_state.claim."""
        parameters = [shard.parameter for shard in self._shards]
        return ShardState(self.comm, parameters, lambda number: self._state_of(self._shards[number]), self._reshard)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Not of one rank: raises RuntimeError, which says what to use."""
        raise RuntimeError(STATE_IS_ON_ALL_RANKS)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not from one rank: raises RuntimeError, which says what to use."""
        raise RuntimeError(STATE_IS_ON_ALL_RANKS)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: {STATE_IS_ON_ALL_RANKS}")

    def saved_slices(self) -> list[SavedSlice]:
        """Weights, master weights (where layers are gathered in 16 bits) and optimizer state of this rank."""
        self._take_over_written()
        slices = []
        for shard in self._shards:
            if shard.values.numel() == 0:
                continue
            slices.append(SavedSlice("weight", shard.name, shard.start, shard.values.to(self._dtype)))
            if self._dtype != torch.float32:
                slices.append(SavedSlice("master", shard.name, shard.start, shard.values))
            state = self._state_of(shard)
            slices += state_slices(state, shard.name, shard.start, slice(None), shard.values.numel())
        return slices

    def rank_tensors(self) -> dict[str, Tensor]:
        """What belongs to this rank alone."""
        return {}

    def counters(self) -> dict[str, Any]:
        """The groups' settings, as plain values: the same on every rank."""
        return counters_of(self._name, self.param_groups)

    @torch.no_grad()
    def load(self, source: SliceSource) -> None:
        """Take over what another run saved, of any stage and number of ranks.

        Raises KeyError where a parameter was not saved, ValueError where another optimizer's state was.
        """
        saved = source.counters()
        check_same_optimizer(saved, self._name, self.param_groups)
        self.load_weights(source)
        if self._optimizer is not None:
            packed = self._optimizer.state_dict()
            states = [read_state(source, one.name, one.start, one.values.numel()) for one in self._in_order()]
            packed["state"] = {place: state for place, state in enumerate(states) if state}
            self._optimizer.load_state_dict(packed)
        take_over_settings(saved, self.param_groups)

    def reset_state(self) -> None:
        """Forget moments and step counts: the optimizer is as new, the weights and settings stay."""
        self._optimizer: torch.optim.Optimizer | None = None
        if self._used_groups:
            self._optimizer = self._build([self._inner_group(number) for number in self._used_groups])

    @torch.no_grad()
    def load_weights(self, source: SliceSource) -> None:
        """Take over the weights alone, whatever optimizer they were trained with."""
        self.zero_grad()
        self._reshard()
        for shard in self._shards:
            shard.values.copy_(read_weight(source, torch.float32, shard.name, shard.start, shard.values.numel()))
        self._show(self._shards)

    # One step

    def _norm(self, gradients: list[Tensor | None]) -> float:
        """Of the averaged gradient, loss scale divided out. Collective.

        Raises ValueError, on every rank, where ranks have other hyperparameters.
        """
        norms = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in gradients if one is not None]
        square = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
        votes = torch.stack([square, *square.new_tensor(settings_votes(self.param_groups, self._steps)).unbind()])
        votes = votes.to(self._device)
        self._vote_comm.all_reduce(votes)
        total, digests, squares = votes.tolist()
        check_settings_votes(self._vote_comm, self.param_groups, digests, squares)
        return math.sqrt(total) / self._divisor if total >= 0 else math.nan

    def _clip(self, norm: float) -> float:
        """What a gradient of this norm is multiplied by: torch's clip_grad_norm_."""
        return min(1.0, self.max_norm / (norm + 1e-6)) if self.max_norm else 1.0

    def _apply(self, gradients: list[Tensor | None], coefficient: float) -> None:
        if self._optimizer is None:
            return
        self._take_over_written()
        for shard, gradient in zip(self._shards, gradients, strict=True):
            if gradient is not None and coefficient != 1.0:
                gradient.mul_(coefficient)
            shard.values.grad = gradient if gradient is None else gradient.to(shard.values.device)
        for number, inner in zip(self._used_groups, self._optimizer.param_groups, strict=True):
            inner.update(group_settings(self.param_groups[number]))
        self._optimizer.step()
        self._show(shard for shard, gradient in zip(self._shards, gradients, strict=True) if gradient is not None)
        for shard in self._shards:
            shard.values.grad = None

    def _show(self, shards: Iterable[_Shard]) -> None:
        """Have FSDP2 gather what is stepped elsewhere."""
        if self._stepped_apart:
            for shard in shards:
                shard.shown.copy_(shard.values)
            self._note_versions()

    @torch.no_grad()
    def _take_over_written(self) -> None:
        """Have what is stepped elsewhere follow what somebody has written into the parameters."""
        if self._stepped_apart:
            for shard, version in zip(self._shards, self._versions, strict=True):
                if shard.version != version:
                    shard.values.copy_(shard.shown)
            self._note_versions()

    def _note_versions(self) -> None:
        self._versions = [shard.version for shard in self._shards] if self._stepped_apart else []

    def _inner_group(self, number: int) -> dict[str, Any]:
        shards = [shard.values for shard in self._shards if shard.group == number and shard.values.numel()]
        return {**group_settings(self.param_groups[number]), "params": shards}

    def _in_order(self) -> list[_Shard]:
        """The shards as the torch optimizer numbers them."""
        return [
            shard
            for number in self._used_groups
            for shard in self._shards
            if shard.group == number and shard.values.numel()
        ]

    def _state_of(self, shard: _Shard) -> dict[str, Any]:
        if self._optimizer is None:
            return {}
        state: dict[str, Any] = self._optimizer.state.get(shard.values, {})
        return state


def _copy_on(device: torch.device, shown: Tensor, pin: bool) -> Tensor:
    copied = shown.detach().to(device, copy=True)
    return copied.pin_memory() if pin and device.type == "cpu" and shown.device.type != "cpu" else copied


def _gradient(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else local_run(parameter.grad)[1]
