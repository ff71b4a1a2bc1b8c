"""Parameters as views of flat buckets, the fp32 master weights of their owners, and all of a model's together.

The parameters of one bucket lie in one contiguous tensor, with which the model computes: a collective moves whole
shards without copying parameters together first. New weights may be in flight while the next forward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm import Communicator
from thinwire.comm.agreement import check_same_on_every_rank, link_nodes, on_every_rank
from thinwire.zero.bucket_layout import BucketLayout, Slot
from thinwire.zero.gradient_seal import whole_of
from thinwire.zero.memory import in_own_storage
from thinwire.zero.placement import MovedOut, Placement, Sharding, WeightGate
from thinwire.zero.rank_checks import broadcast_from_rank_0
from thinwire.zero.replica import Replica, fsdp_parts, kind_of
from thinwire.zero.saved_state import SavedSlice, SliceSource, read_weight


@dataclass(frozen=True)
class Run:
    """The part of one parameter that lies in a range of a bucket.

    `start`: its first element within the flattened parameter. `place`: where it lies within the range.
    """

    parameter: int
    start: int
    place: slice

    @property
    def numel(self) -> int:
        """How many elements it is."""
        return int(self.place.stop - self.place.start)


def runs_in(layout: BucketLayout, place: slice) -> list[Run]:
    """List the parts of parameters in elements `place` of a bucket, with places relative to its start."""
    begin, end = place.start, place.stop
    cuts = ((one, max(one.offset, begin), min(one.offset + one.numel, end)) for one in layout.slots)
    found = ((slot, first, last) for slot, first, last in cuts if first < last)
    return [Run(slot.parameter, first - slot.offset, slice(first - begin, last - begin)) for slot, first, last in found]


class FlatBucket:
    """Parameters as views of `flat`, [padded_numel] in `dtype`, and the shard of it that this rank owns.

    Construction moves the parameters: their `.data` becomes a view. Of values that are rounded to `dtype`, those before
    are kept in fp32 for `take_initial`: the shard's, or at stage 0 the whole bucket's. `family`: all buckets of a
    model. `gathering`: what gathers shards, over `comm`'s ranks or by node. `seed`: of what is rounded by chance.
    """

    def __init__(self, model: ShardedParameters, index: int, layout: BucketLayout, dtype: torch.dtype) -> None:
        self.index, self.layout = index, layout
        self.dtype, self.comm = dtype, model.exchange_comm
        self.gathering = self.comm if model.links is None else model.links
        self.family = model.buckets
        self.parameters = [model.order.parameters[slot.parameter] for slot in layout.slots]
        tie = kind_of(self.parameters[0])[1]
        self.seed = index if tie < 0 else (1 << 19) + tie
        self._shapes = {slot: one.shape for slot, one in self.members()}
        self.flat = torch.zeros(layout.padded_numel, dtype=dtype, device=self.parameters[0].device)
        rounds = any(parameter.dtype != dtype for parameter in self.parameters)
        self._initial = self._initial_values(whole=model.sharding.stage == 0) if rounds else None
        self._addresses, self._versions = [], []
        for slot, parameter in self.members():
            view = self.view(self.flat, slot)
            view.copy_(parameter.detach())
            parameter.data = in_own_storage(view)
            self._addresses.append(view.data_ptr())
            self._versions.append(parameter._version)

    @property
    def own_range(self) -> tuple[int, int]:
        """The elements of the bucket that this rank owns, valid ones only."""
        start = self.comm.rank * self.layout.shard
        return min(start, self.layout.numel), min(start + self.layout.shard, self.layout.numel)

    @property
    def own_runs(self) -> list[Run]:
        """The parts of parameters in this rank's shard."""
        return runs_in(self.layout, slice(*self.own_range))

    def shard_of(self, bucket: Tensor) -> Tensor:
        """This rank's shard of a tensor of [padded_numel], a view."""
        return bucket[self.comm.rank * self.layout.shard :][: self.layout.shard]

    def view(self, bucket: Tensor, slot: Slot) -> Tensor:
        """The part of a tensor of [padded_numel] that belongs to a parameter, in the parameter's shape."""
        return bucket[slot.offset : slot.offset + slot.numel].view(self._shapes[slot])

    def shape_of(self, parameter: int) -> torch.Size:
        """The shape of the parameter with this number."""
        return next(shape for slot, shape in self._shapes.items() if slot.parameter == parameter)

    def members(self) -> list[tuple[Slot, Tensor]]:
        """The parameters with their slots."""
        return list(zip(self.layout.slots, self.parameters, strict=True))

    @torch.no_grad()
    def take_written(self) -> list[Slot]:
        """The parameters that were written since the last call; what goes through `flat` does not count.

        One whose `.data` was replaced is moved into `flat` again, with its new values.
        """
        written, moved = [], False
        for number, parameter in enumerate(self.parameters):
            version, self._versions[number] = self._versions[number], parameter._version
            elsewhere = parameter.data_ptr() != self._addresses[number]
            if elsewhere or version != self._versions[number]:
                written.append(self.layout.slots[number])
                moved |= elsewhere
        for bucket in self.family if moved else ():
            bucket._keep_moved()
        for slot, parameter in self.members() if moved else ():
            view = self.view(self.flat, slot)
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter)
                parameter.data = in_own_storage(view)
        return written

    def _keep_moved(self) -> None:
        """Give parameters whose `.data` was replaced memory of their own: it may be that of others in these buckets."""
        for number, parameter in enumerate(self.parameters):
            if parameter.data_ptr() != self._addresses[number]:
                parameter.data = parameter.detach().clone()

    def take_initial(self) -> Tensor | None:
        """The values that the parameters had before they were rounded, fp32, if they were; forgotten here."""
        initial, self._initial = self._initial, None
        return initial

    def _initial_values(self, *, whole: bool) -> Tensor:
        numel = self.layout.padded_numel if whole else self.layout.shard
        values = torch.zeros(numel, device=self.flat.device)
        by_number = {slot.parameter: one for slot, one in self.members()}
        for run in runs_in(self.layout, slice(0, self.layout.numel)) if whole else self.own_runs:
            parameter = by_number[run.parameter].detach()
            values[run.place].copy_(parameter.reshape(-1)[run.start : run.start + run.numel])
        return values


class MasterWeights:
    """Master weights of a bucket, fp32: the whole bucket's or this rank's shard's.

    fp32 parameters are their own master weights, unless `offload` keeps them in CPU memory, page-locked with
    `pin_memory`, for parameters on a GPU, or they may be `ahead` of the parameters, as their differences are rounded.
    Once `moved_out` to a disk, with the state, `weights` and `views` are this rank's part of the parameters themselves.

    `runs`: the stretches of parameters that this rank keeps, with places in `weights`. `views`: their weights, fp32,
    one-dimensional. `offloaded`: whether they are in CPU memory, and the parameters are not. `separate`: whether they
    are other tensors than the parameters' own. `send`: what publishes weights that may be ahead.
    """

    def __init__(self, bucket: FlatBucket, sharding: Sharding) -> None:
        self.bucket, self.whole = bucket, sharding.stage == 0
        self.ahead = sharding.codecs is not None and not self.whole
        self.send: Callable[[Tensor], Callable[[], None]] | None = None
        self.offloaded = sharding.offload and bucket.flat.device.type != "cpu"
        self.separate = self.offloaded or self.ahead or (bucket.dtype != torch.float32 and sharding.disk is None)
        self.moved_out: MovedOut | None = None
        self._pin_memory = sharding.pin_memory
        self.runs = runs_in(bucket.layout, slice(0, bucket.layout.numel)) if self.whole else bucket.own_runs
        self.weights = self._initial_weights()
        self._landing: Tensor | None = None
        self.views = [self.weights[run.place] for run in self.runs]

    @property
    def held(self) -> slice:
        """What this rank keeps, as elements of the bucket, padding included."""
        layout = self.bucket.layout
        first = 0 if self.whole else self.bucket.comm.rank * layout.shard
        return slice(first, layout.padded_numel if self.whole else first + layout.shard)

    def publish(self, exactly: bool = False) -> Callable[[], None]:
        """Give the new weights to the parameters of every rank; returns what waits until they are there."""
        if self.send is not None and not exactly:
            return self.send(self.weights)
        if self.whole:
            if self.separate:
                self.bucket.flat.copy_(self.weights)
            return lambda: None
        # Page-locked weights leave while the host goes on, and are rounded where that is fast. They change again only
        # after the host has waited for the next step's gradients, which come behind them.
        shard = self.weights.to(self.bucket.flat.device, non_blocking=True)
        return self.bucket.gathering.all_gather(self.bucket.flat, shard.to(self.bucket.dtype), async_op=True).wait

    def start_bringing(self, values: Tensor) -> Tensor:
        """`values`, fp32 like the weights, on their way to lie beside them: there once the host has waited."""
        if not self.offloaded:
            return values
        if self._landing is None:
            self._landing = self._rest(torch.empty_like(self.weights))
        return self._landing.copy_(values, non_blocking=self._pin_memory)

    def own_cuts(self) -> list[tuple[int, slice]]:
        """The numbers of the runs that reach into this rank's shard, each with those of its elements that do."""
        low, high = self.bucket.own_range
        first = low if self.whole else 0
        cuts = []
        for number, run in enumerate(self.runs):
            begin, end = max(run.place.start, first), min(run.place.stop, first + high - low)
            if begin < end:
                cuts.append((number, slice(begin - run.place.start, end - run.place.start)))
        return cuts

    def saved_slices(self, names: Sequence[str]) -> list[SavedSlice]:
        """Weights and master weights of this rank's shard."""
        own = self.bucket.shard_of(self.bucket.flat)
        slices = [SavedSlice("weight", names[run.parameter], run.start, own[run.place]) for run in self.bucket.own_runs]
        for number, cut in self.own_cuts() if self.separate else ():
            run = self.runs[number]
            slices.append(SavedSlice("master", names[run.parameter], run.start + cut.start, self.views[number][cut]))
        return slices

    @torch.no_grad()
    def load(self, source: SliceSource, names: Sequence[str]) -> None:
        """Take them over; the parameters hold their weights already."""
        if self.offloaded:
            torch.accelerator.current_stream(self.bucket.flat.device).synchronize()  # earlier weights may be leaving
        for run, view in zip(self.runs, self.views, strict=True):
            view.copy_(read_weight(source, torch.float32, names[run.parameter], run.start, run.numel))
        if self.moved_out is not None:
            self.moved_out.load_weights(source, names)

    def take_over(self, parameters: Collection[int]) -> None:
        """Have the values that these parameters show, by number."""
        if self.moved_out is not None:
            self.moved_out.take_over(parameters)
        if self.separate:
            shown = self.bucket.flat[self.held]
            for run, view in zip(self.runs, self.views, strict=True):
                if run.parameter in parameters:
                    view.copy_(shown[run.place])

    def _initial_weights(self) -> Tensor:
        replica = self.bucket.flat if self.whole else self.bucket.shard_of(self.bucket.flat)
        if not self.separate:
            return replica.detach()
        initial = self.bucket.take_initial()
        if initial is None:
            initial = replica.detach().to("cpu" if self.offloaded else replica.device, torch.float32, copy=True)
        return self._rest(initial.to("cpu")) if self.offloaded else initial

    def _rest(self, weights: Tensor) -> Tensor:
        return weights.pin_memory() if self._pin_memory else weights


def bring_beside(master_weights: Sequence[MasterWeights], values: Sequence[Tensor]) -> list[Tensor]:
    """`values`, fp32 like each of `master_weights`, where those are: for weights that are offloaded copies, which the
    next call for them overwrites. All leave before the host waits, once."""
    brought = [one.start_bringing(of_one) for one, of_one in zip(master_weights, values, strict=True)]
    if any(one.offloaded for one in master_weights):
        torch.accelerator.current_stream(master_weights[0].bucket.flat.device).synchronize()
    return brought


class ShardedParameters:
    """An optimizer's parameters, with this rank's master weights; the same on every rank but for these.

    `comm`: of the caller. `exchange_comm`: a copy for all that is sent, whose rank is the shard owned; `links`: beside
    it, by node, `saved_nodes` each rank's. `order`: numbers, names, groups. `gate`: of a forward that waits, or None.

    Raises ValueError or TypeError, on every rank, for parameters that cannot be sharded, or that differ between ranks;
    `settings` are compared too.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        sharding: Sharding,
        settings: Mapping[str, Any],
    ) -> None:
        groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
        self.comm, self.groups, self.sharding = comm, groups, sharding
        place = partial(Placement, optimizer, named_parameters, sharding)
        self.order = on_every_rank(comm, place, "build its optimizer", (ValueError, TypeError))
        compared = {**sharding.compared(), "names": self.names, **settings}
        self.replica = Replica.among(comm, self.order.parameters)
        gathered = on_every_rank(comm, partial(fsdp_parts, self.order.parameters), "take FSDP2's parts", (ValueError,))
        check_same_on_every_rank(comm, self.order.parameters, groups, compared)
        broadcast_from_rank_0(comm, self.order.parameters)
        if self.replica is not None:
            self.replica.check(self.order.parameters, self.names, compared)
        self.nodes, self.links = link_nodes(comm, sharding.nodes, alike=True)
        self.saved_nodes = None if self.links is None else list(self.nodes.node_of)
        self.exchange_comm = comm.duplicate() if self.links is None else self.links.number_by_lane(comm)
        self.buckets: list[FlatBucket] = []
        self.master_weights: list[MasterWeights] = []
        self.gate: WeightGate | None = None
        self.gated: set[int] = set()
        for index, (layout, dtype) in enumerate(self.order.partition(comm.size, sharding)):
            self.buckets.append(FlatBucket(self, index, layout, dtype))
            self.master_weights.append(MasterWeights(self.buckets[-1], sharding))
        for one in gathered:
            one.reset_sharded_param()  # to gather from where the parts lie now
        self.shares = [] if self.replica is None else [self.replica.share(one.parameters[0]) for one in self.buckets]

    @property
    def names(self) -> list[str]:
        """Of the parameters, by number."""
        return self.order.names

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self.buckets[0].flat.device

    @property
    def gradient_bytes(self) -> int:
        """Of an element of the gradients that add up."""
        return self.sharding.averaging.accumulated(self.buckets[0].dtype).itemsize

    def agree_on_absent(self, missing: Sequence[int]) -> frozenset[int]:
        """The parameters that are `missing` on every rank. Collective."""
        here = set(missing)
        mask = bytes(number in here for number in range(len(self.order.parameters)))
        of_rank = self.exchange_comm.all_gather_bytes(mask, "find the step's missing gradients")
        return frozenset(number for number in here if all(other[number] for other in of_rank))

    # New weights on their way

    def gather_during_forward(self, module: nn.Module) -> None:
        """Let new weights arrive while `module`'s next forward runs: see ShardedOptimizer."""
        if self.gate is not None:
            raise RuntimeError("gather_during_forward() was called before: pass it the module that holds all others")
        within = {id(parameter) for parameter in module.parameters()}
        shown = {bucket.index: [id(whole_of(one)) for one in bucket.parameters] for bucket in self.buckets}
        if self.links is None:
            self.gated = {index for index, ids in shown.items() if within.issuperset(ids)}
        bucket_of = {one: index for index, ids in shown.items() for one in ids}
        self.gate = WeightGate(module, bucket_of)

    def wait_for_weights(self) -> None:
        """Wait until this rank has the last step's weights."""
        if self.gate is not None:
            self.gate.open()

    def move_and_publish(self, buckets: Iterable[int], move: Callable[[int], None]) -> None:
        """Call `move` with the number of each of `buckets`, which moves its master weights; give them to all ranks.

        The buckets that forward uses first come last in backward: their weights leave first.
        """
        waits = []
        for number in reversed(list(buckets)):
            move(number)
            waits.append((number, self.master_weights[number].publish()))
            if self.sharding.disk is not None and len(waits) > 1:  # what leaves is a copy, and memory is short
                waits.pop(0)[1]()
        for number, wait in waits:
            if self.gate is None or number not in self.gated:
                wait()
            else:
                self.gate.close(number, wait)

    @torch.no_grad()
    def take_over_written(self) -> None:
        """Take over into master weights what was written into parameters, alike on every rank."""
        for one in self.master_weights:
            if written := one.bucket.take_written():
                one.take_over({slot.parameter for slot in written})

    def accept_written(self) -> None:
        """Leave master weights as they are, whatever was written into parameters so far."""
        for bucket in self.buckets:
            bucket.take_written()

    # Checkpoints

    def saved_slices(self) -> list[SavedSlice]:
        """Weights and master weights of this rank's shards."""
        self.wait_for_weights()
        self.take_over_written()
        return [saved_slice for one in self.master_weights for saved_slice in one.saved_slices(self.names)]

    @torch.no_grad()
    def load_weights(self, source: SliceSource) -> None:
        """Take over the weights, whatever optimizer they were trained with. Raises KeyError for one not saved."""
        self.wait_for_weights()
        for one in self.master_weights:
            bucket = one.bucket
            dtype = None if one.ahead else bucket.dtype  # else what fp32 parameters were behind of
            for slot in bucket.layout.slots:
                values = read_weight(source, dtype, self.names[slot.parameter], 0, slot.numel)
                bucket.view(bucket.flat, slot).view(-1).copy_(values)
        for master_weights in self.master_weights:
            master_weights.load(source, self.names)
        self.accept_written()
