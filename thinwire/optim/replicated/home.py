"""The home of optimizers whose state every rank holds."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.comm.agreement import NodeLinks, agree_on_nodes, raise_together
from thinwire.compress.codecs import make_codec
from thinwire.optim import checkpoint
from thinwire.optim.algorithm import Algorithm, LocalSteps
from thinwire.optim.checkpoint import LEFT_OUT_STEPS, ranks_to_resume, read_left_out_steps
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.optim.home import AlgorithmHome, check_may_leave_out
from thinwire.optim.options import HomeOptions, Recipe
from thinwire.optim.preconditioner import as_plain
from thinwire.optim.replicated.capture import Graphs, StepCapture, check_can_be_captured
from thinwire.optim.replicated.parameter_state import ReplicatedParameterState, frozen_bytes
from thinwire.optim.replicated.parameters import ParameterTable, weight_and_master
from thinwire.optim.replicated.synchronizer import FreezeGroups, SynchronizedBackward, Synchronizer
from thinwire.optim.wire import Wire
from thinwire.zero import rank_checks
from thinwire.zero.bucket_layout import model_state_formula
from thinwire.zero.home import NO_GRADIENTS, ParameterState, StepResult
from thinwire.zero.saved_state import OneRankState, SavedSlice, SliceSource

__all__ = ["ReplicatedHome"]


class ReplicatedHome(AlgorithmHome):
    """All state on every rank: whole parameters, laid out as their first gradients arrive.

    `groups`: the freeze groups, in the order in which they entered.
    """

    kind = "replicated"
    elastic = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        options: HomeOptions,
        recipe: Recipe,
        make_rule: Callable[[], FreezeRule | None],
    ) -> None:
        """`optimizer` holds the groups; `make_rule`: for parameters that enter now."""
        self.comm = comm
        self._options = options
        self._recipe = recipe
        self._settings = {**recipe.settings, "codec": options.codec, "block_size": options.block_size}
        self._optimizer_name = type(optimizer).__name__
        self._table = ParameterTable(optimizer, recipe.hyperparameters, options.named_parameters, options.param_dtype)
        self.parameters, self.names = self._table.parameters, self._table.names
        self._nodes = agree_on_nodes(comm, None if isinstance(options.nodes, str) else options.nodes)
        by_node = self._nodes.hierarchical and options.nodes != "flat"
        self._links = NodeLinks(comm, self._nodes) if by_node else None
        self._exchange_comm = comm.duplicate()
        self._wire = Wire(
            self._exchange_comm,
            self._links,
            make_codec(options.codec, options.block_size),
            make_codec(options.exact_codec, options.block_size),
        )
        self._layout = FreezeGroups(self._exchange_comm, self._table, self._wire, options, recipe.algorithm, make_rule)
        self.groups = self._layout.groups
        self.mover: Callable[[Callable[[], None]], None] = operator.call
        self._comparisons = rank_checks.ComparisonTimes(options.resync_interval)
        self._synchronizer = Synchronizer(comm, self._table, self._layout, options.clips_to)
        self.watcher = self._synchronizer.watcher
        self.add_parameters()

    # What it reports

    @property
    @override
    def algorithms(self) -> list[Algorithm]:
        return [group.algorithm for group in self.groups]

    @property
    @override
    def steps(self) -> int:  # type: ignore[override]
        return self._layout.step.number

    @property
    @override
    def frozen(self) -> bool:
        return all(group.clock.frozen for group in self.groups) if self.groups else self.frozen_at is not None

    @property
    @override
    def frozen_at(self) -> int | None:  # type: ignore[override]
        if self.groups:
            return self.groups[0].clock.frozen_at
        return None if self._recipe.algorithm().freezes else 0

    @property
    @override
    def in_sync(self) -> bool:  # type: ignore[override]
        return all(group.in_sync for group in self.groups)

    @property
    @override
    def left_out_steps(self) -> int:
        return sum(group.left_out_steps for group in self.groups)

    @property
    @override
    def bytes_sent(self) -> int:
        by_node = 0 if self._links is None else self._links.bytes_inside + self._links.bytes_between
        return self._exchange_comm.traffic.bytes_sent + by_node

    @property
    @override
    def bytes_sent_between_nodes(self) -> int:
        flat = round(self._exchange_comm.traffic.bytes_sent * self._nodes.part_between(self.comm.rank))
        return flat if self._links is None else flat + self._links.bytes_between

    @property
    @override
    def uncompressed_step_bytes(self) -> int:  # type: ignore[override]
        return self._layout.uncompressed_bytes

    @property
    @override
    def loss_scale(self) -> float:
        return self._synchronizer.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._synchronizer.loss_scale = scale

    @property
    @override
    def scaled(self) -> bool | None:
        return self._synchronizer.scaled

    @scaled.setter
    def scaled(self, scaled: bool | None) -> None:
        self._synchronizer.scaled = scaled

    # One step

    @override
    def step(self) -> StepResult:
        self.watcher.seal.check()
        result = self._apply(self._synchronizer.finish_as_it_is())
        self._synchronizer.end_step()
        return result

    def capture(self, graphs: Graphs) -> StepCapture:
        """What captures and replays frozen steps; while it does, its `move` is `mover`. Raises TypeError for steps that
        no graph can hold, ValueError for such a communicator."""
        by_node, clips = self._links is not None, bool(self._options.clips_to)
        check_can_be_captured(self._optimizer_name, self._recipe.algorithm(), by_node, clips)
        graphs.check(self._exchange_comm)
        return StepCapture(self._exchange_comm, self._table, self._layout, self._synchronizer, graphs)

    def _apply(self, backward: SynchronizedBackward) -> StepResult:
        synchronizer = self._synchronizer
        if len(backward.absent) == len(self._table):
            return StepResult(False, math.nan, NO_GRADIENTS)
        if not backward.finite:
            ranks = list(backward.overflowing)
            where = f"on ranks {ranks}" if ranks else "after averaging, on no rank before"
            return StepResult(False, math.inf, f"a gradient was NaN or infinite {where}")
        for group in self.groups:
            group.receive_averages()
        synchronizer.find_clip(backward.absent)
        self.mover(partial(self._move, backward.absent))
        self._layout.step.number += 1
        self._compare_replicas()
        return StepResult(True, self._layout.step.norm / self.loss_scale)

    def _move(self, absent: frozenset[int]) -> None:
        for group in self.groups:
            group.update(absent, self.loss_scale, float(self._layout.step.clip))

    def _compare_replicas(self) -> None:
        """Now and then, see whether all ranks hold the same weights, and give them rank 0's where not. Collective."""
        if not self._comparisons.due(self.steps, self.in_sync):
            return
        if not rank_checks.compare_replicas(self.comm, self.parameters, self.steps, self._options.on_drift, "rank 0's"):
            indices = range(len(self._table))
            rank_checks.broadcast_from_rank_0(self.comm, [self._table.weight(index) for index in indices])
            for index in indices:
                self._table.publish(index)

    @override
    def drop(self) -> None:
        if self.watcher.in_step:
            self._synchronizer.finish()
            self._synchronizer.end_step()

    @override
    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        check_may_leave_out(self._recipe.algorithm())
        super().leave_out(parameters)

    @override
    def end_backward(self) -> None:
        """Buckets that a parameter holds back leave in `step`."""

    @override
    def name(self, names: Mapping[int, str]) -> None:
        self._table.call(names)

    @override
    def add_parameters(self) -> None:
        new = self._table.new_parameters()
        tensors = [parameter for parameter, _ in new]
        error: Exception | None = None
        try:
            for group in self._table.groups():
                self._recipe.check_group(group)
            rank_checks.check_parameters([*self.parameters, *tensors], self._optimizer_name)
            self._options.averaging.check_parameters(tensors, self._options.param_dtype)
        except (ValueError, TypeError) as raised:
            error = raised
        raise_together(self.comm, error, "build its optimizer")
        names = [self._table.known_name(one) for one in tensors]
        compared = {"names": names, **self._options.compared(), **self._settings, **self._recipe.schedule}
        rank_checks.check_same_on_every_rank(self.comm, tensors, self._table.groups(), compared)
        rank_checks.broadcast_from_rank_0(self.comm, tensors)
        for parameter, group_number in new:
            self._layout.unplaced.append(len(self._table))
            self._table.add(parameter, group_number)
        self._options.averaging.prepare(tensors)
        self.watcher.watch(tensors)
        if not self.watcher.in_step:
            self._synchronizer.prepare()

    # Weights

    @override
    def synchronize_weights(self) -> None:
        if self.watcher.in_step:
            raise RuntimeError("synchronize_weights() was called between backward() and step(): call step() first")
        for group in self.groups:
            group.meet(self.steps)

    @override
    def show_own_weights(self, own: bool) -> None:
        for group in self.groups:
            group.show_own_weights(own)

    @override
    def parameter_state(self) -> ParameterState:
        return ReplicatedParameterState(self.comm, self._table, self._layout, self._synchronizer)

    # Checkpoints

    @override
    def saved_slices(self) -> list[SavedSlice]:
        names = self._table.names
        found = [one for group in self.groups for one in checkpoint.slices(group, names, self.comm.rank)]
        placed = {slot.parameter for bucket in self._layout.buckets for slot in bucket.layout.slots}
        waiting = [index for index, one in enumerate(self.parameters) if index not in placed and one.requires_grad]
        for index in waiting if self.comm.rank == 0 else ():
            for kind, values in zip(("weight", "master"), weight_and_master(self._table, index, False), strict=True):
                if values is not None and values.numel():
                    found.append(SavedSlice(kind, names[index], 0, values.reshape(-1)))
        return found

    @override
    def rank_tensors(self) -> dict[str, Tensor]:
        found = {LEFT_OUT_STEPS: torch.tensor([group.left_out_steps for group in self.groups], dtype=torch.int64)}
        for group in self.groups:
            found |= checkpoint.rank_tensors(group, self._table.names)
        return found

    @override
    def counters(self) -> dict[str, Any]:
        return {
            "names": list(self._table.names),
            "settings": dict(self._settings),
            "nodes": None if self._links is None else list(self._nodes.node_of),
            "step": self.steps,
            "shared_at": self._comparisons.shared_at,
            "loss_scale": self.loss_scale,
            "freeze_groups": [
                {
                    **checkpoint.counters(group.clock, group.rule, group.algorithm, self._table.names),
                    "buckets": [[self._table.names[slot.parameter] for slot in b.layout.slots] for b in group.buckets],
                }
                for group in self.groups
            ],
        }

    @override
    def load(self, source: SliceSource) -> None:
        """Residuals that cannot be had start from zero, with a warning."""
        saved = source.counters()
        checkpoint.check_settings(saved["settings"], self._settings)
        saved_by = f"rank {source.rank}" if isinstance(source, OneRankState) else "a job"
        source = as_plain(source)
        if "weight" in source.kinds():
            self.load_weights(source)
        self._table.read_masters(source)
        number_of = {name: index for index, name in enumerate(self._table.names)}
        self._layout.restore(
            [
                self._layout.all_trainable()
                if group["buckets"] is None
                else [[number_of[name] for name in bucket] for bucket in group["buckets"]]
                for group in saved["freeze_groups"]
            ]
        )
        local = isinstance(self._recipe.algorithm(), LocalSteps)
        compresses = any(local or group["frozen_at"] is not None for group in saved["freeze_groups"])
        nodes = None if self._links is None else list(self._nodes.node_of)
        ranks = ranks_to_resume(source, self.comm, nodes, saved_by, compresses)
        for group, of_group in zip(self.groups, saved["freeze_groups"], strict=True):
            checkpoint.load(group, self._table.names, of_group, source, ranks)
        self._layout.step.number = saved["step"]
        self._comparisons.shared_at = saved.get("shared_at", saved["step"])
        self.loss_scale = saved["loss_scale"]
        if ranks == [self.comm.rank]:
            left_out = read_left_out_steps(source, self.comm.rank, len(self.groups))
            for group, steps in zip(self.groups, left_out, strict=True):
                group.left_out_steps = steps
        self._synchronizer.prepare()

    @override
    def load_weights(self, source: SliceSource) -> None:
        self._table.read_weights(source)
        for group in self.groups:
            group.drop_local_progress()

    @override
    def reset_state(self) -> None:
        self._layout.restore([])
        self._synchronizer.prepare()
        self._layout.step.number = 0
        self._comparisons.shared_at = 0
        for index, parameter in enumerate(self.parameters):
            self._table.state(index).clear()
            if parameter.dtype != torch.float32:
                self._table.make_master(index)

    @override
    def torch_state(self) -> dict[int, dict[str, Tensor]]:
        states = ((index, self._table.state(index)) for index in range(len(self._table)))
        return {index: dict(state) for index, state in states if state}

    @override
    def model_state_bytes(self) -> dict[str, float]:
        """Once frozen what is held."""
        if self.frozen:
            return frozen_bytes(self.parameters, self.torch_state().values(), self._layout.buckets)
        state = 4 * len(self._recipe.algorithm().state)
        numel = sum(parameter.numel() for parameter in self.parameters if parameter.requires_grad)
        size = self.parameters[0].element_size()
        held = self._options.averaging.accumulated(self.parameters[0].dtype).itemsize
        return model_state_formula(0, numel, self.comm.size, element_bytes=size, state_bytes=state, gradient_bytes=held)

    @override
    def close(self) -> None:
        self._exchange_comm.close()
        if self._links is not None:
            self._links.close()
