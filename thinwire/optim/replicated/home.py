"""The home of optimizers whose state every rank holds."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.comm.agreement import check_same_on_every_rank, link_nodes, raise_together
from thinwire.comm.elastic import Elastic
from thinwire.optim.bucket import Bucket, place_of
from thinwire.optim.freeze_group import FreezeGroup
from thinwire.optim.home import AlgorithmHome, check_in_sync, check_settings, slices
from thinwire.optim.options import HomeOptions, Recipe
from thinwire.optim.replicated.capture import CudaGraphs, StepCapture, check_can_be_captured
from thinwire.optim.replicated.elastic_buckets import ElasticSynchronizer
from thinwire.optim.replicated.elastic_workers import ElasticWorkers
from thinwire.optim.replicated.joining import CommonState
from thinwire.optim.replicated.owned_steps import elastic_kinds
from thinwire.optim.replicated.parameters import ParameterTable, weight_and_master
from thinwire.optim.replicated.synchronizer import FreezeGroups, SynchronizedBackward, Synchronizer
from thinwire.optim.step import Send
from thinwire.optim.storage import counted_bytes
from thinwire.optim.wire import Wire
from thinwire.zero import Slot, rank_checks
from thinwire.zero.bucket_layout import model_state_formula
from thinwire.zero.home import NO_GRADIENTS, Fragment, Held, ParameterState, StepResult
from thinwire.zero.replica import Replica, checksum
from thinwire.zero.saved_state import SavedSlice, SliceSource, counters_of, take_over_settings
from thinwire.zero.sharded_home import ComparisonTimes


class ReplicatedHome(AlgorithmHome):
    """All state on every rank: whole parameters, laid out as their first gradients arrive."""

    kind = "replicated"
    grows = True
    workers: ElasticWorkers | None = None  # that come and go

    def __init__(
        self, optimizer: torch.optim.Optimizer, comm: Communicator, options: HomeOptions, recipe: Recipe
    ) -> None:
        """`optimizer` holds the groups."""
        self.comm = comm
        self._options, self._recipe = options, recipe
        self._optimizer_name = type(optimizer).__name__
        self._table = ParameterTable(optimizer, options, recipe)
        self.parameters, self.names = self._table.parameters, self._table.names
        self._nodes, self._links = link_nodes(comm, options.nodes)
        self._exchange_comm = comm.duplicate()
        wire = Wire(self._exchange_comm, options, self._links, decisions=None if options.elastic is None else comm)
        self._layout = FreezeGroups(self._table, wire, options, recipe.algorithm, self._make_rule)
        self.groups, self.in_flight = self._layout.groups, self._layout.step
        self.mover: Callable[[Callable[[], None]], None] = operator.call
        self._comparisons = ComparisonTimes(options.resync_interval)
        self._synchronizer = elastic_kinds(options)[0](self, self._table, self._layout)
        self.watcher = self._synchronizer.watcher
        self.add_parameters()
        if options.elastic is not None:
            self.workers, self.grows = _enter(self, options.elastic, optimizer.param_groups), False

    # What it reports

    @property
    @override
    def bytes_sent(self) -> int:
        if self.workers is not None:
            return self.workers.bytes_sent
        by_node = 0 if self._links is None else self._links.bytes_inside + self._links.bytes_between
        return self._exchange_comm.traffic.bytes_sent + by_node

    @property
    @override
    def bytes_sent_between_nodes(self) -> int:
        if self.workers is not None:
            return self.workers.bytes_sent
        flat = round(self._exchange_comm.traffic.bytes_sent * self._nodes.part_between(self.comm.rank))
        return flat if self._links is None else flat + self._links.bytes_between

    @property
    @override
    def uncompressed_step_bytes(self) -> int:  # type: ignore[override]
        return self._layout.uncompressed_bytes

    # One step

    @override
    def step(self) -> StepResult:
        self.watcher.seal.check()
        workers = self.workers
        result = self._apply(self._synchronizer.finish_as_it_is() if workers is None else workers.bring())
        self._synchronizer.end_step()
        if workers is not None:
            workers.end_step()
        return result

    def capture(self, graphs: CudaGraphs) -> StepCapture:
        """What captures and replays frozen steps; while it does, its `move` is `mover`. Raises TypeError for steps that
        no graph can hold, ValueError for such a communicator."""
        by_node = self._links is not None
        check_can_be_captured(self._optimizer_name, self._recipe.algorithm(), by_node, bool(self.in_flight.max_norm))
        graphs.check(self._exchange_comm)
        return StepCapture(self._exchange_comm, self._table, self._layout, self._synchronizer, graphs)

    def _apply(self, backward: SynchronizedBackward) -> StepResult:
        if len(backward.absent) == len(self._table):
            return StepResult(False, math.nan, NO_GRADIENTS)
        if not backward.finite:
            ranks = list(backward.overflowing)
            elsewhere = "after averaging, on no rank before" if self.replica is None else "elsewhere in the model"
            where = f"on ranks {ranks}" if ranks else elsewhere
            return StepResult(False, math.inf, f"a gradient was NaN or infinite {where}")
        self.watcher.turn.moving = True
        for group in self.groups:
            for bucket in group.buckets if group.send is Send.EXACT else ():
                bucket.receive()
        if self.in_flight.max_norm:
            self._synchronizer.find_clip(backward.absent)
        step = self.in_flight

        def move() -> None:
            for group in self.groups:
                group.update(backward.absent, step.loss_scale, float(step.clip))

        self.mover(move)
        step.number += 1
        self._compare_replicas()
        return StepResult(True, step.norm / step.loss_scale)

    def _compare_replicas(self) -> None:
        """Now and then, see whether all ranks hold the same weights, and give them rank 0's where not. Collective."""
        if not self._comparisons.due(self.in_flight.number, self.in_sync):
            return
        wire, on_drift = self._layout.wire, self._options.on_drift
        comm = wire.decisions if wire.changes else self.comm  # who looks on is no worker yet, and has theirs told
        if not rank_checks.compare_replicas(comm, self.parameters, self.steps, on_drift, "rank 0's"):
            rank_checks.broadcast_from_rank_0(comm, self._table.weights())
            self._table.publish_all()

    @override
    def end_step(self) -> None:
        self._synchronizer.end_step()

    @override
    def drop(self) -> None:
        if self.watcher.in_step:
            self._synchronizer.drop()

    @override
    def synchronize_weights(self) -> None:
        """In an elastic job this worker's part in it ends."""
        if self.workers is None or self.watcher.in_step:
            super().synchronize_weights()
        else:
            self.workers.end(self.steps)

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
            for group in self._table.groups:
                self._recipe.check_group(group)
            rank_checks.check_parameters([*self.parameters, *tensors], self._optimizer_name)
            self._options.averaging.check_parameters(tensors, self._options.param_dtype)
        except (ValueError, TypeError) as raised:
            error = raised
        raise_together(self.comm, error, "build its optimizer")
        names = [self._table.known_name(one) for one in tensors]
        compared = {"names": names, **self._options.compared(), **self._recipe.compared}
        found = Replica.among(self.comm, tensors) if self.replica is None else self.replica
        check_same_on_every_rank(self.comm, tensors, self._table.groups, compared)
        rank_checks.broadcast_from_rank_0(self.comm, tensors)
        if found is not None:
            found.check(tensors, [name or "" for name in names], compared)
        self.replica = self._table.replica = found
        for parameter, group_number in new:
            self.in_flight.unplaced.append(len(self._table))
            self._table.add(parameter, group_number)
        self._options.averaging.prepare(tensors)
        self.watcher.watch(tensors)
        if not self.watcher.in_step:
            self._synchronizer.prepare()

    @override
    def parameter_state(self) -> ParameterState:
        return _State(self.comm, self._table, self._layout, self._synchronizer)

    # Checkpoints

    @override
    def saved_slices(self) -> list[SavedSlice]:
        names, rank, alone = self._table.names, self.comm.rank, self.workers is not None
        found = [one for group in self.groups for one in slices(group, names, rank, alone=alone)]
        found += [] if self.workers is None else self.workers.own_slices()
        placed = {slot.parameter for bucket in self._layout.buckets for slot in bucket.layout.slots}
        waiting = [index for index, one in enumerate(self.parameters) if index not in placed and one.requires_grad]
        for index in waiting if self.comm.rank == 0 else ():
            for kind, values in zip(("weight", "master"), weight_and_master(self._table, index, False), strict=True):
                if values is not None and values.numel():
                    found.append(SavedSlice(kind, names[index], 0, values.reshape(-1)))
        return found

    @override
    def counters(self) -> dict[str, Any]:
        found, names = super().counters(), self._table.names
        for of_group, group in zip(found["freeze_groups"], self.groups, strict=True):
            of_group["buckets"] = [[names[slot.parameter] for slot in one.layout.slots] for one in group.buckets]
        found |= {} if self.workers is None else {"claimed": self.workers.membership.claims.taken}
        return {**found, "nodes": self._saved_nodes, "shared_at": self._comparisons.shared_at}

    @property
    def _saved_nodes(self) -> list[int] | None:
        return None if self._links is None else list(self._nodes.node_of)

    @override
    def check(self, source: SliceSource, nodes: Sequence[int] | None = None) -> None:
        check_settings(source.counters()["settings"], self.counters()["settings"])
        super().check(source, self._saved_nodes)

    @override
    def load(self, source: SliceSource) -> None:
        """Residuals that cannot be had start from zero, with a warning."""
        if self.workers is not None:
            self.workers.check_may_load()
        saved = source.counters()
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
        self._load_groups(source, saved["freeze_groups"], self._saved_nodes)
        self.in_flight.number = saved["step"]
        self._comparisons.shared_at = saved.get("shared_at", saved["step"])
        self.loss_scale = saved["loss_scale"]
        self._synchronizer.prepare()
        if self.workers is not None:
            weights = sum(map(checksum, self._table.weights())) % (1 << 32)
            self.workers.membership.claims.go_on_from(saved.get("claimed", 0))
            self.workers.begin_at(f"step {self.steps}, {weights:08x}", source)

    @override
    def load_weights(self, source: SliceSource) -> None:
        self._table.read_weights(source)
        for group in self.groups:
            group.drop_local_progress()

    @override
    def reset_state(self) -> None:
        self._layout.restore([])
        self._synchronizer.prepare()
        self.in_flight.number = self._comparisons.shared_at = 0
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
            entries = [(name, one) for state in self.torch_state().values() for name, one in state.items()]
            master_weights = [one for name, one in entries if name == "master"]
            states = [one for name, one in entries if name != "master"]
            return counted_bytes(self.parameters, master_weights, states, self._layout.buckets)
        state = 4 * len(self._recipe.algorithm().state)
        numel = sum(parameter.numel() for parameter in self.parameters if parameter.requires_grad)
        size = self.parameters[0].element_size()
        held = self._options.averaging.accumulated(self.parameters[0].dtype).itemsize
        given = {"element_bytes": size, "state_bytes": state, "gradient_bytes": held}
        found = model_state_formula(0, numel, 1, **given)
        for one in () if self.workers is None else self.workers.own_slices():
            found["optimizer state"] += one.tensor.nbytes * (not one.kind.startswith("scalar."))
        return found

    @override
    def close(self) -> None:
        for one in (self._exchange_comm, self._links, self.workers):
            if one is not None:
                one.close()


def _enter(home: ReplicatedHome, elastic: Elastic, groups: list[dict[str, Any]]) -> ElasticWorkers:
    """Make a home's worker of an elastic job, whose buckets are the same whichever gradients come first."""
    home._layout.restore([home._layout.all_trainable()])
    home._synchronizer.prepare()
    assert isinstance(home._synchronizer, ElasticSynchronizer)
    compared = {**home._options.compared(), **home._recipe.compared, "optimizer": home._optimizer_name}

    def load(where: dict[str, Any]) -> None:
        take_over_settings(where, groups)
        home.in_flight.number, home._comparisons.shared_at = where["step"], where["shared_at"]

    state = CommonState(home._layout, groups, lambda: {**counters_of("", groups), **home.counters()}, load)
    made = elastic_kinds(home._options)[1]
    return made(elastic, home._options, home._layout, home._synchronizer, compared, state, home._apply)


class _State(ParameterState):
    """Weights in `table`, state and averages in the buckets of `layout`."""

    cuts_parameters = False

    def __init__(
        self, comm: Communicator, table: ParameterTable, layout: FreezeGroups, synchronizer: Synchronizer
    ) -> None:
        self.comm = comm
        self._table = table
        self._layout = layout
        self._synchronizer = synchronizer

    @override
    def parameter(self, number: int) -> Tensor:
        return self._table.parameters[number]

    @override
    def weights(self, number: int) -> Held:
        check_in_sync(all(group.in_sync for group in self._layout.groups))
        return Held([Fragment(0, self._table.weight(number).detach().reshape(-1))], everywhere=True)

    @override
    def after_writing_weights(self, number: int, value: Tensor | None) -> None:
        assert value is not None, "every rank has all of its weights"
        with torch.no_grad():
            self._table.weight(number).copy_(value)
        self._table.publish(number)

    @override
    def state(self, number: int, kind: str) -> Held:
        found = self._find(number)
        if found is None:
            return Held([], everywhere=True, known=kind in self.kinds())
        group, bucket, slot = found
        group.check_plain(kind)
        values = bucket.state.get(kind)
        fragments = [] if values is None else [Fragment(0, values[place_of(slot)])]
        return Held(fragments, everywhere=True, known=values is not None)

    @override
    def check_may_write_state(self, kind: str) -> None:
        for group in self._layout.groups:
            group.check_may_write(kind)

    @override
    def gradient(self, number: int) -> Held | None:
        if not self._synchronizer.watcher.in_step:
            return None
        found = self._find(number)
        if found is not None:
            found[0].check_averages()
        self._synchronizer.finish()
        found = self._find(number)  # its first gradient gives it a place
        average = None if found is None else found[1].average()
        return None if found is None or average is None else Held([Fragment(0, average[place_of(found[2])])], True)

    @override
    def after_writing_gradient(self, number: int) -> None:
        found = self._find(number)
        assert found is not None, "a parameter without a place has no averaged gradient"
        found[1].rewritten = True
        self._synchronizer.outcome = None  # to be found out again

    @override
    def kinds(self) -> list[str]:
        return sorted({kind for bucket in self._layout.buckets for kind in bucket.state})

    def _find(self, number: int) -> tuple[FreezeGroup, Bucket, Slot] | None:
        for group in self._layout.groups:
            for bucket in group.buckets:
                for slot in bucket.layout.slots:
                    if slot.parameter == number:
                        return group, bucket, slot
        return None
