"""The base of every home whose parameters lie in flat buckets and whose master weights are sharded; what the ranks vote
on in a step, and when they compare replicas."""

from __future__ import annotations

import math
import operator
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.comm.agreement import check_same_on_every_rank
from thinwire.zero.backward import BackwardWatcher
from thinwire.zero.gradient_seal import gradient_of
from thinwire.zero.home import Fragment, Held, Home, ParameterState, ring_bytes
from thinwire.zero.master_weights import FlatBucket, MasterWeights, ShardedParameters, runs_in
from thinwire.zero.rank_checks import refuse_unfrozen
from thinwire.zero.replica import Replica
from thinwire.zero.saved_state import SavedSlice, SliceSource


class BucketParameterState(ParameterState):
    """Weights and gradients in a home's buckets; a subclass has what the home keeps beside them, by bucket's number."""

    cuts_parameters = False

    def __init__(self, home: ShardedHome) -> None:
        self.comm = home.comm
        self._home = home
        self._parameters = home._parameters

    @abstractmethod
    def average(self, bucket: int) -> Tensor | None:
        """The averaged gradient that has arrived, of the whole bucket or of this rank's shard; None in no step."""

    @abstractmethod
    def state_in(self, bucket: int, number: int, kind: str) -> Held:
        """A parameter's optimizer state, as `state`."""

    def check_weights(self) -> None:
        """Raise RuntimeError if ranks hold different weights."""

    def check_gradients(self) -> None:
        """Raise RuntimeError if no gradients are averaged."""

    def gradients_rewritten(self, bucket: int) -> None:
        """Note that `average` was written into."""

    def weights_rewritten(self, bucket: int) -> None:
        """Note that parameters were written, and that their master weights have followed."""

    @override
    def parameter(self, number: int) -> Tensor:
        return self._parameters.order.parameters[number]

    @override
    def weights(self, number: int) -> Held:
        self.check_weights()
        self._parameters.wait_for_weights()
        index = self._bucket_of(number)
        master_weights = self._parameters.master_weights[index]
        if written := master_weights.bucket.take_written():
            master_weights.take_over({slot.parameter for slot in written})
            self.weights_rewritten(index)
        return Held(own_fragments(master_weights, number, master_weights.views), master_weights.whole)

    @override
    def after_writing_weights(self, number: int, value: Tensor | None) -> None:
        assert value is not None, "a bucket's weights are written whole, on every rank"
        index = self._bucket_of(number)
        self.parameter(number).copy_(value)
        # The master weight has more than the parameter shows.
        self._parameters.master_weights[index].bucket.take_written()
        self.weights_rewritten(index)

    @override
    def state(self, number: int, kind: str) -> Held:
        return self.state_in(self._bucket_of(number), number, kind)

    @override
    def gradient(self, number: int) -> Held | None:
        self.check_gradients()
        self._home.watcher.wait_for_averages()
        index = self._bucket_of(number)
        bucket = self._parameters.buckets[index]
        average = self.average(index)
        if average is None:
            return None
        if average.numel() == bucket.layout.padded_numel:  # of one rank too, whose shard is the bucket
            return of_whole_bucket(bucket, number, average)
        runs = [run for run in bucket.own_runs if run.parameter == number]
        return Held([Fragment(run.start, average[run.place]) for run in runs], everywhere=False)

    @override
    def after_writing_gradient(self, number: int) -> None:
        if number in self._home.watcher.arrived:
            self._home.watcher.seal.take([number])
        self.gradients_rewritten(self._bucket_of(number))
        self._home._vote_is_outdated = True

    def _bucket_of(self, number: int) -> int:
        return next(
            index
            for index, bucket in enumerate(self._parameters.buckets)
            if any(slot.parameter == number for slot in bucket.layout.slots)
        )


def own_fragments(master_weights: MasterWeights, number: int, values: Sequence[Tensor | None]) -> list[Fragment]:
    """What a rank keeps of a parameter; `values`: of each of the master weights' runs, None where there are none."""
    return [
        Fragment(run.start, one)
        for run, one in zip(master_weights.runs, values, strict=True)
        if run.parameter == number and one is not None
    ]


def of_whole_bucket(bucket: FlatBucket, number: int, values: Tensor, known: bool = True) -> Held:
    """A parameter's part of [padded_numel] that every rank has alike."""
    runs = [run for run in runs_in(bucket.layout, slice(0, bucket.layout.numel)) if run.parameter == number]
    return Held([Fragment(run.start, values[run.place]) for run in runs], everywhere=True, known=known)


NOT_FINITE = "a gradient was NaN or infinite"


class Vote(NamedTuple):
    """What the ranks find out together before a step is applied.

    `finite`: the averaged gradient is. `norm`: of the averaged gradient, times the loss scale; NaN if it was not
    found. `absent`: the parameters that had a gradient on no rank.
    """

    finite: bool
    norm: float
    absent: frozenset[int]


class ShardedHome(Home):
    """Buckets of `parameters`, watched during backward; a subclass says what is sent and what a step does."""

    kind = "sharded"

    def __init__(self, parameters: ShardedParameters) -> None:
        self.comm = parameters.comm
        self.parameters, self.names = parameters.order.parameters, parameters.names
        self.uncompressed_step_bytes = ring_bytes(self.comm.size, self.parameters)
        self._parameters, self.replica = parameters, parameters.replica
        self.watcher = BackwardWatcher(parameters.order.describe, self._on_whole)
        self.watcher.watch(self.parameters)
        self._vote: Vote | None = None  # of the step in flight, once it is known
        self._vote_is_outdated = False  # whether gradients were written after it
        self._stand_in: Tensor | None = None  # a parameter with a gradient that only a GradScaler looks at

    @property
    @override
    def bytes_sent(self) -> int:
        links = self._parameters.links
        by_node = 0 if links is None else links.bytes_inside + links.bytes_between
        return self._parameters.exchange_comm.traffic.bytes_sent + by_node

    @property
    @override
    def bytes_sent_between_nodes(self) -> int:
        parameters = self._parameters
        flat = round(parameters.exchange_comm.traffic.bytes_sent * parameters.nodes.part_between(self.comm.rank))
        return flat if parameters.links is None else flat + parameters.links.bytes_between

    # One step

    @abstractmethod
    def _find_vote(self) -> Vote:
        """Find out what the ranks must know, once everything has arrived. Collective."""

    @override
    def drop(self) -> None:
        self._end_vote()
        self.watcher.drop()

    @override
    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        self.watcher.leave_out(parameters, self._parameters.exchange_comm)

    @override
    def name(self, names: Mapping[int, str]) -> None:
        self._parameters.order.name(names)

    @property
    def _keeps_gradients(self) -> bool:
        sharding = self._parameters.sharding
        return sharding.stage < 2 or sharding.codecs is not None

    def _finish(self) -> Vote:
        """Bring all that is sent of this step to its end, and vote. Collective."""
        if self._vote is None:
            self.watcher.finish()
            self._vote = self._find_vote()
        return self._vote

    def _begin_step(self) -> Vote:
        """What `step` begins with; collective."""
        frozen = self._parameters.order.frozen
        if frozen and any(one.requires_grad for one in frozen):
            refuse_unfrozen(frozen)
        if self._parameters.gate is not None:
            self._parameters.wait_for_weights()
        averages_shown = self._vote is not None and self._parameters.sharding.stage == 0
        if self.watcher.seal.check(may_write=averages_shown) and averages_shown:
            self._vote = None if self.replica is not None else self._vote_on_edited()
        if self.scaled and not self._keeps_gradients:
            raise RuntimeError(
                "a GradScaler cannot look at gradients that stage 2 has sent to their owners: use stage 1, the "
                "engine's fp16 with its own loss scale, or bf16"
            )
        if self._vote_is_outdated:
            self._vote, self._vote_is_outdated = None, False
        if self._vote is None:
            self.watcher.finish()
            self._vote = self._find_vote()
        return self._vote

    @override
    def end_step(self) -> None:
        self._end_vote()
        self.watcher.end_step()

    def _end_vote(self) -> None:
        self._vote = None
        self._vote_is_outdated = False
        if self._stand_in is not None:
            self._stand_in.grad = None
            self._stand_in = None

    def _on_whole(self) -> None:
        """Let a GradScaler, if there is one, see in `.grad` whether any rank's gradients are not finite."""
        if self._parameters.sharding.stage == 0:
            self._finish()  # averages are in `.grad` then, as with DDP, and what is done to them takes effect
        if self.scaled is False or not self._keeps_gradients:
            return
        finite = self._finish().finite
        held = [parameter for parameter in self.parameters if gradient_of(parameter) is not None and parameter.numel()]
        if held and not finite:
            gradient = held[0].grad
            assert gradient is not None
            gradient[(0,) * gradient.dim()] = math.inf
        elif not held and (candidates := [parameter for parameter in self.parameters if parameter.numel()]):
            self._stand_in = min(candidates, key=Tensor.numel)
            dtype = self._parameters.sharding.averaging.accumulated(self._stand_in.dtype)
            self._stand_in.grad = torch.full_like(self._stand_in, 0.0 if finite else math.inf, dtype=dtype)

    def _vote_on_averages(self, averages: Mapping[int, Tensor]) -> Vote:
        """The vote on averaged gradients, of which this rank gives its shards, by bucket. Collective."""
        parameters, missing = self._parameters, self.watcher.missing
        given = parameters.exchange_comm, list(averages.values()), parameters.groups, self.steps, parameters.device
        shares = None if self.replica is None else (self.replica, list(map(parameters.shares.__getitem__, averages)))
        norm, anything_missing = norm_of_averages(*given, bool(missing), shares)
        absent = parameters.agree_on_absent(missing) if anything_missing else frozenset[int]()
        return Vote(math.isfinite(norm), norm, absent | self.watcher.left_out)

    def _vote_on_edited(self) -> Vote | None:
        """The vote on averages that were written to where they are shown; None to find it out again."""
        return None

    # Weights

    @override
    def gather_during_forward(self, module: nn.Module) -> None:
        self._parameters.gather_during_forward(module)

    @override
    def wait_for_weights(self) -> None:
        self._parameters.wait_for_weights()

    # Checkpoints

    def saved_slices(self) -> list[SavedSlice]:
        """Slices of weights and master weights."""
        return self._parameters.saved_slices()

    @override
    def load_weights(self, source: SliceSource) -> None:
        self._parameters.load_weights(source)

    @override
    def close(self) -> None:
        self._parameters.exchange_comm.close()
        if self._parameters.links is not None:
            self._parameters.links.close()

    @property
    def _numel(self) -> int:
        """Elements that are trained."""
        return sum(parameter.numel() for parameter in self.parameters)


_PLAIN = (int, float, str, tuple, type(None))


def settings_digest(groups: Sequence[Mapping[str, Any]], step: int) -> int:
    """16 bits that differ, but for chance, between ranks whose groups have other hyperparameters in this step, or other
    parameters that are trained.

    Numbers, strings and lists of them count, and one-element tensors in CPU memory: nothing waits for a GPU. With the
    step's number in it, what chance hid in one step shows in the next.
    """
    values = []
    for group in groups:
        trained = bytes(map(operator.attrgetter("requires_grad"), group.get("params", ())))
        of_group: list[object] = [zlib.crc32(trained)]
        for name, value in group.items():
            if isinstance(value, Tensor):
                of_group += [(name, float(value))] if value.numel() == 1 and value.device.type == "cpu" else []
            elif isinstance(value, _PLAIN):
                of_group.append((name, value))
        values.append(of_group)
    return zlib.crc32(repr((step, values)).encode()) & 0xFFFF


def check_interval(steps: int) -> None:
    """Raise ValueError unless replicas can be compared after so many `steps`."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not steps >= 1:
        raise ValueError(f"resync_interval must be a whole number of steps from 1, got {steps!r}")


class ComparisonTimes:
    """When replicas are compared: after every `interval`-th step or, where ranks hold weights of their own then, after
    the next that leaves them with the same."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self.shared_at = 0
        """The last step that left all ranks with the same weights."""

    def due(self, steps: int, in_sync: bool) -> bool:
        """Whether now, after `steps` steps. `in_sync`: all ranks should hold the same weights."""
        if not in_sync:
            return False
        passed = steps // self._interval > self.shared_at // self._interval
        self.shared_at = steps
        return passed


def norm_of_averages(
    comm: Communicator,
    averages: Sequence[Tensor],
    groups: Sequence[Mapping[str, Any]],
    step: int,
    device: torch.device,
    missing: bool = False,
    shares: tuple[Replica, Sequence[float]] | None = None,
) -> tuple[float, bool]:
    """The 2-norm of all ranks' `averages`, or of norms of them, together, NaN for one that none could be, and whether
    any rank has something `missing`. Collective. `shares`: the ranks of a replica, and the part of each average's sum
    that this one counts.

    Raises ValueError, on every rank and naming the first difference, where ranks have other hyperparameters.
    """
    place = averages[0].device if averages else device  # FSDP2 offloads gradients of some parameters and not of others
    norms = [(torch.linalg.vector_norm(one, dtype=torch.float32) if one.dim() else one).to(place) for one in averages]
    norms.append(torch.zeros((), device=place))
    votes = torch.empty(4, dtype=torch.float64, device=device)
    squares = torch.stack(norms).double().square()
    votes[0] = (squares if shares is None else squares * squares.new_tensor([*shares[1], 1.0])).sum()
    digest = settings_digest(groups, step)
    for vote, own in enumerate((missing, digest, digest**2), start=1):
        votes[vote].fill_(own)  # in the launch itself: a copy of a list would wait for the device
    comm.all_reduce(votes)
    ranks = comm.size if shares is None else shares[0].add_votes(votes, comm.size)
    total, anything_missing, digests, of_squares = votes.tolist()
    if ranks * of_squares != digests**2:  # whole numbers, exact: only of equal numbers are the two the same
        check_same_on_every_rank(comm, [], groups, {})
        if shares is not None:
            shares[0].refuse(groups)
    return math.sqrt(total) if total >= 0 else math.nan, bool(anything_missing)


def norm_of_own(averages: Sequence[Tensor], ranks: int) -> float:
    """The 2-norm of averages that this rank holds whole, to the bit what `norm_of_averages` makes of its ranks' shards;
    NaN for one that none could be."""
    square = 0.0
    for rank in range(ranks):
        norms = [torch.linalg.vector_norm(one.view(ranks, -1)[rank], dtype=torch.float32) for one in averages]
        square += float(torch.stack(norms).double().square().sum()) if norms else 0.0
    return math.sqrt(square) if square >= 0 else math.nan
