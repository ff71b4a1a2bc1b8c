"""Frozen steps of parameters whose state every rank holds, captured as graphs: one that brings gradients and both legs
of all buckets, and one that moves the weights once the host has read the headers in between.

What changes from step to step lies in an arena, which one copy renews before a replay: the headers' step and settings,
learning rates, betas and loss scale. Residuals take turns in two places, so that there are two graphs of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.collectives import Traffic
from thinwire.comm.operation_log import LoggedCommunicator
from thinwire.compress.exchange import Arrived
from thinwire.compress.kernels.buckets import RenewFactors
from thinwire.compress.kernels.loading import execute
from thinwire.compress.kernels.tables import Arena, CapturedTables
from thinwire.compress.packet import step_and_settings
from thinwire.optim.algorithm import Algorithm
from thinwire.optim.bucket import Bucket
from thinwire.optim.freeze_group import FreezeGroup
from thinwire.optim.replicated.parameters import ParameterTable
from thinwire.optim.replicated.synchronizer import FreezeGroups, Synchronizer


class CudaGraphs:
    """CudaGraphs of one device: launches that are captured once, and replayed without the host's work. They share their
    memory: of what one leaves behind, only what is still held is safe from the next."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @staticmethod
    def check(comm: Communicator) -> None:
        """Raise ValueError for a communicator whose collectives cannot be captured."""
        if isinstance(comm, LoggedCommunicator):
            raise ValueError(
                "collectives whose times are logged cannot be captured in a CUDA graph: take the log away "
                "(comms_logger), or do not capture steps"
            )
        if comm.backend != "nccl" and comm.size > 1:
            raise ValueError(
                f"collectives over {comm.backend} cannot be captured in a CUDA graph, as the host takes part in them: "
                "use NCCL, with thinwire.comm.init(backend='nccl'), or do not capture steps"
            )

    def new(self) -> CudaGraph:
        """Make one that may follow any other of these."""
        return CudaGraph(self._stream, self._pool)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Launch what is inside where captures take place, before and after all that is outside.

        autograd remembers on which stream a parameter was first used, and no other can be captured.
        """
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


class CudaGraph:
    """What was launched while it was captured; its memory is its own as long as it lives."""

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._stream = stream
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture what is launched inside, in place of running it.

        Other threads, NCCL's watchdog among them, may go on with what a capture forbids.
        """
        captured = torch.cuda.graph(
            self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with captured:
            yield

    def replay(self) -> None:
        """Launch it all, with the values that are in the same memory now."""
        self._graph.replay()


_TURNS = 2
_RUN_BYTES = 64
"""More than what a table says of a run."""
_NUMBERS = 4
"""Bytes of a header that change from step to step."""


class _CapturedBucket:
    """One bucket's launches in a graph."""

    def __init__(self, group: FreezeGroup, bucket: Bucket, arena: Arena, numbers: Tensor) -> None:
        self.bucket = bucket
        self._group = group
        self._tables = CapturedTables(arena)
        self._numbers = numbers
        self._arrived: Arrived | None = None

    @staticmethod
    def room(bucket: Bucket) -> int:
        """Bytes of an arena that its launches take."""
        return 2 * len(bucket.exchange.parts) * Arena.room(_RUN_BYTES * len(bucket.segments))

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Have what the bucket launches inside read from the arena."""
        segments, exchange = self.bucket.segments, self.bucket.exchange
        before, segments.tables, exchange.numbers = segments.tables, self._tables, self._numbers
        try:
            yield
        finally:
            segments.tables, exchange.numbers = before, None

    def hold(self) -> None:
        """Hold what the legs, captured by now, bring whenever they are replayed."""
        self._arrived = self.bucket.exchange.hold_arrived()

    def renew(self) -> None:
        """Have the arena's copy on the host say what the next step's launches have to know."""
        clock = replace(self._group.clock, steps=self._group.clock.steps + 1)
        execute(RenewFactors(self._tables, *self.bucket.payload_factors(), *self.bucket.rates(clock)))

    def arrive_again(self, step: int, settings: int) -> None:
        """Be where legs that a graph has replayed leave the exchange."""
        assert self._arrived is not None
        self.bucket.sent = self.bucket.exchange
        self.bucket.exchange.arrive_again(self._arrived, step, settings)


@dataclass
class _Turn:
    """The graphs of the steps that find residuals in one of their two places. `gradients`: what the first one leaves in
    `.grad`. `traffic`: of one replay. `output`: what the captured work has returned."""

    arena: Arena
    numbers: Any
    buckets: Sequence[_CapturedBucket]
    exchanging: CudaGraph
    moving: CudaGraph | None = None
    gradients: list[Tensor | None] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    output: Any = None

    @contextmanager
    def capturing(self, graph: CudaGraph) -> Iterator[None]:
        """Capture what is launched inside."""
        with ExitStack() as stack:
            for captured in self.buckets:
                stack.enter_context(captured.capturing())
            stack.enter_context(graph.capturing())
            yield


@dataclass(eq=False)
class StepCapture:
    """Captures and replays the steps of a ReplicatedHome, which gives it its parts.

    `comm`: what exchanges go over.
    """

    _comm: Communicator
    _table: ParameterTable
    _layout: FreezeGroups
    _synchronizer: Synchronizer
    _graphs: CudaGraphs
    _turns: dict[tuple[int, ...], _Turn] = field(default_factory=dict)
    _turn: _Turn | None = None

    @property
    def possible(self) -> bool:
        """Whether the next step can be captured, or replayed: all are frozen, and nothing is special about it."""
        layout = self._layout
        return (
            bool(layout.groups)
            and not layout.trainable_unplaced
            and not self._synchronizer.watcher.in_step
            and all(group.clock.frozen for group in layout.groups)
            and all(storage.moves_in_place() for storage in layout.storages)
        )

    def forget(self) -> None:
        """Let the graphs go."""
        self._turns = {}

    def exchange(self, work: Callable[[], Any]) -> tuple[Any, bool]:
        """Do what `work` does, a synchronised backward at its end, and bring both legs of all buckets; the step comes
        next. Returns what `work` returned, and whether it was replayed."""
        for group in self._layout.groups:
            group.take_over_written()
        places = self._places()
        turn = self._turns.get(places)
        if turn is None:
            self._turn = turn = self._capture(work)
            if len(self._turns) >= _TURNS:
                self.forget()
            self._turns[places] = turn
            return turn.output, False
        self._turn = turn
        self._replay(turn)
        return turn.output, True

    def move(self, move: Callable[[], None]) -> None:
        """Move the weights by what the exchange has brought, as `move` does."""
        turn = self._turn
        assert turn is not None, "move() follows exchange()"
        if turn.moving is None:
            moving = self._graphs.new()
            with turn.capturing(moving):
                move()
            turn.arena.bring()
            moving.replay()
            turn.moving = moving
            return
        turn.moving.replay()
        for group, storage in zip(self._layout.groups, self._layout.storages, strict=True):
            group.clock.steps += 1
            for bucket in group.buckets:
                bucket.exchange.commit()
                weights, replicas = storage.to_move(bucket)
                torch.autograd.graph.increment_version([one for one in weights + replicas if one is not None])
                storage.accept_moved(bucket)
            group.prepare()

    def _capture(self, work: Callable[[], Any]) -> _Turn:
        turn = self._new_turn()
        before = self._comm.traffic.copy()
        for parameter in self._table.parameters:
            parameter.grad = None  # so that the graph's memory becomes it
        watcher = self._synchronizer.watcher
        # Nothing reads gradients before a replay.
        self._synchronizer.capturing, watcher.seal.samples_values = True, False
        try:
            with turn.capturing(turn.exchanging):
                turn.output = work()
                watcher.finish()
        except BaseException:
            self._synchronizer.end_step()
            raise
        finally:
            self._synchronizer.capturing, watcher.seal.samples_values = False, True
        turn.traffic = self._comm.traffic.since(before)
        turn.gradients = [one.grad for one in self._table.parameters]
        for captured in turn.buckets:
            captured.hold()
        self._number(turn)
        turn.arena.bring()
        turn.exchanging.replay()
        return turn

    def _new_turn(self) -> _Turn:
        of_group = [(group, bucket) for group in self._layout.groups for bucket in group.buckets]
        room = Arena.room(_NUMBERS) + sum(_CapturedBucket.room(bucket) for _, bucket in of_group)
        arena = Arena(room, self._table.parameters[0].device)
        on_host, on_device = arena.take(_NUMBERS)
        captured = [_CapturedBucket(group, bucket, arena, on_device) for group, bucket in of_group]
        return _Turn(arena, on_host, captured, self._graphs.new())

    def _replay(self, turn: _Turn) -> None:
        step_in_flight = self._layout.step
        for captured in turn.buckets:
            captured.renew()
        self._number(turn)
        turn.arena.bring()
        turn.exchanging.replay()
        self._comm.note_replay(turn.traffic)
        for captured in turn.buckets:
            captured.arrive_again(step_in_flight.number, step_in_flight.settings)
        for parameter, gradient in zip(self._table.parameters, turn.gradients, strict=True):
            parameter.grad = gradient
        self._synchronizer.finish_replay()

    def _number(self, turn: _Turn) -> None:
        step_in_flight = self._layout.step
        turn.numbers[:] = np.frombuffer(
            step_and_settings(step_in_flight.number, step_in_flight.settings), dtype=np.uint8
        )

    def _places(self) -> tuple[int, ...]:
        """Changes with whatever is baked into a captured step: addresses, and what is done at all."""
        found: list[int] = []
        for index, parameter in enumerate(self._table.parameters):
            found += (parameter.data_ptr(), self._table.weight(index).data_ptr(), parameter.requires_grad)
        for bucket in self._layout.buckets:
            found += (*bucket.exchange.places(), bucket.zero_variance is None)
            found += (values.data_ptr() for values in bucket.state.values())
        return tuple(found)


def check_can_be_captured(optimizer: str, algorithm: Algorithm, by_node: bool, clips: bool) -> None:
    """Raise TypeError for an optimizer whose steps no graph can hold."""
    why = ""
    if algorithm.form.payload is None or algorithm.form.update is None:
        why = "it does not send and move whole buckets by one kernel each: use OneBitAdam"
    elif by_node:
        why = 'the host takes part in adding up the ranks of a node: build it with nodes="flat"'
    elif clips:
        why = "max_norm= has it estimate norms with other random numbers in every step: leave it out"
    if why:
        raise TypeError(f"steps of this {optimizer} cannot be captured, as {why}")
