"""The Communicator, all that is known elsewhere about moving bytes: ranks, five collectives and their handles.

Backends only start transfers of flat tensors; checks, byte counts, staging and errors are here, once.
"""

from __future__ import annotations

import os
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar
from weakref import WeakSet

import torch
from torch import Tensor

from thinwire.comm.collectives import (
    Finishing,
    Pending,
    ReduceOp,
    Sizes,
    Staging,
    Traffic,
    Work,
    amount,
    bring_to_host,
    byte_view,
    check_chunks,
    check_rank,
    check_reduction,
    check_tensor,
    check_timeout,
    flat_view,
)
from thinwire.comm.errors import Call, CommunicationError, RollCall, describe_failure, differing_purposes, fork_error
from thinwire.comm.traffic import sent_bytes
from thinwire.lazy_imports import provided

_ALARM_INTERVAL = 0.5
"""Seconds between two looks for the alarm of a rank that failed."""

_COMPLETED = Work()
"""Of collectives that are over when they are issued."""

_LIVING: WeakSet[Communicator] = WeakSet()

Start = Callable[[Call], Pending]
Move = Callable[[Call, Tensor, Tensor, Sizes], Pending]  # output and input, and bytes of unequal chunks

_LONGEST = (1 << 32) - 1
_PURPOSE = 96
"""Bytes of what a control message is for that ranks tell each other where they differ in it."""


class Communicator(ABC):
    """A set of ranks that issue the same collectives in the same order.

    Every collective takes dense contiguous tensors of any shape and treats them as flat. It returns a
    ``Work``; without ``async_op`` that is already complete. A tensor given to an asynchronous collective
    must not be touched before ``wait``. Bad arguments raise ``ValueError`` or ``TypeError`` before anything
    is sent; failures of ranks raise ``CommunicationError``, after which the communicator stays unusable.

    ``rank``, ``size``, ``backend`` ("gloo", "nccl", "mpi", "threads" or "single"), ``timeout`` in seconds,
    ``traffic``: the bytes this rank sent. ``speaks``: whether this rank tells the user, on stderr, what goes on.
    ``global_ranks``: of each rank, the one that it has in the whole job, by which errors call it.
    """

    usual_timeout: ClassVar[float] = 300.0
    """Of those that are made without one: what `init` was given last."""

    _transport_errors: tuple[type[Exception], ...] = ()

    def __init__(self, rank: int, size: int, backend: str, timeout: float | None) -> None:
        timeout = self.usual_timeout if timeout is None else timeout
        check_timeout(timeout)
        self.rank, self.size = rank, size
        self.backend = backend
        self.timeout = timeout
        self.traffic = Traffic()
        self.speaks = False
        self.global_ranks: Sequence[int] = range(size)
        self._sequence = 0
        self._failure: CommunicationError | None = None
        self._staging = Staging()
        _LIVING.add(self)

    @staticmethod
    def of(group: object, timeout: float | None = None) -> Communicator:
        """Make one of the ranks of a torch process group or one-dimensional DeviceMesh, or of an mpi4py communicator,
        by all of these ranks and no others; `timeout`: None is that of `init`. Raises TypeError or ValueError for what
        is none, or not this process's."""
        made: Communicator = provided("communicators of groups").communicator_of(group, timeout)
        return made

    def all_to_all(self, output: Tensor, input: Tensor, *, sizes: Sizes = None, async_op: bool = False) -> Work:
        """Send chunk j of ``input`` to rank j; chunk i of ``output`` is what rank i sent here. Chunks are equal, or of
        ``sizes`` elements by the rank that gets them, the same on every rank."""
        check_chunks("all_to_all", output, input, sizes, self.rank, self.size)
        return self._move("all_to_all", self._start_all_to_all, output, input, async_op, sizes=sizes)

    def all_gather(self, output: Tensor, input: Tensor, *, sizes: Sizes = None, async_op: bool = False) -> Work:
        """Concatenate the ``input`` of all ranks, in rank order, in ``output``. Inputs are equal, and may then be chunk
        ``rank`` of ``output`` itself, which is not copied; or of ``sizes`` elements by rank, the same on every rank."""
        check_chunks("all_gather", output, input, sizes, self.rank, self.size)
        return self._move("all_gather", self._start_all_gather, output, input, async_op, sizes=sizes)

    def broadcast(self, tensor: Tensor, root: int = 0, *, async_op: bool = False) -> Work:
        """Copy ``tensor`` of rank ``root`` into ``tensor`` of every rank."""
        check_tensor("broadcast", "tensor", tensor)
        check_rank("broadcast", root, self.size)

        def start(call: Call, output: Tensor, *_: object) -> Pending:
            return self._start_broadcast(call, output, root)

        return self._move("broadcast", start, tensor, tensor, async_op, f" from rank {self.global_ranks[root]}")

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", *, async_op: bool = False) -> Work:
        """Replace ``tensor`` by its sum, mean, maximum or minimum over the ranks; the same on all.

        float64, float32, float16, bfloat16, and int64, int32, int8, uint8 except for "mean". 16-bit
        floats are summed in their own precision.
        """
        check_tensor("all_reduce", "tensor", tensor)
        check_reduction(tensor, op)
        wire_op: ReduceOp = "sum" if op == "mean" else op
        flat = flat_view(tensor)
        if self.size == 1:
            return self._complete_alone("all_reduce", flat, flat)
        host, arrived = bring_to_host(flat) if self._needs_staging(flat.device, reduction=True) else (flat, None)
        signature = f"all_reduce({op}) of {amount(tensor)}"

        def start(call: Call) -> Pending:
            pending = self._start_all_reduce(call, host, wire_op)
            if host is not flat:
                pending = Finishing(pending, lambda: flat.copy_(host, non_blocking=True))
            return Finishing(pending, lambda: flat.div_(self.size)) if op == "mean" else pending

        return self._issue("all_reduce", signature, flat.nbytes, start, async_op, arrived)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._gather_on_host("barrier", torch.zeros(1, dtype=torch.uint8))

    def all_gather_bytes(self, payload: bytes, purpose: str = "") -> list[bytes]:
        """Gather a small control message of any length from every rank, in rank order.

        ``purpose`` completes "rank 3 is about to ...". Where ranks' purposes differ they are not at the same call, and
        every one of them gets a ``CommunicationError`` that names both, in place of a message that it cannot read.
        """
        if len(payload) > _LONGEST:
            raise ValueError(f"all_gather_bytes: a message of {len(payload)} bytes; the longest is {_LONGEST}")
        head = (zlib.crc32(purpose.encode()) & 0x7FFFFFFF) << 32 | len(payload)  # 31 bits of the purpose, and a length
        heads = self._gather_on_host("all_gather_bytes", torch.tensor([head])).tolist()
        if any(head >> 32 != heads[0] >> 32 for head in heads):
            mine = torch.tensor(list(purpose.encode()[:_PURPOSE].ljust(_PURPOSE)), dtype=torch.uint8)
            purposes = self._gather_on_host("all_gather_bytes", mine).view(self.size, _PURPOSE).numpy()
            told = [bytes(one).decode().strip() for one in purposes]
            self._failure = differing_purposes(dict(zip(self.global_ranks, told, strict=True)))
            raise self._failure
        lengths = [head & _LONGEST for head in heads]
        longest = max(lengths)
        padded = torch.tensor(list(payload.ljust(longest, b"\0")), dtype=torch.uint8)
        data = self._gather_on_host("all_gather_bytes", padded).numpy().tobytes()
        return [data[rank * longest : rank * longest + length] for rank, length in enumerate(lengths)]

    def note_replay(self, traffic: Traffic) -> None:
        """Count the collectives of a graph that was replayed, which are those of ``traffic``: every rank's calls are
        numbered alike, whether it replays them or makes them."""
        self._sequence += traffic.calls
        self.traffic.include(traffic)

    def split(self, color: int | None, key: int | None = None) -> Communicator | None:
        """Group the ranks that give the same ``color`` in a new communicator, ordered by ``key``, then rank.

        Collective: every rank calls it. None as color gives None.
        """
        mine = "" if color is None else f"{color} {self.rank if key is None else key}"
        members: list[tuple[int, int]] = []
        for rank, message in enumerate(self.all_gather_bytes(mine.encode(), "split the communicator")):
            if message:
                other_color, other_key = map(int, message.split())
                if other_color == color:
                    members.append((other_key, rank))
        return self._make_group("split", None if color is None else [rank for _, rank in sorted(members)])

    def duplicate(self, timeout: float | None = None) -> Communicator:
        """Make a communicator of the same ranks with its own message space and byte counts, and ``timeout`` in seconds,
        by default the same. Collective."""
        copy = self._make_group("duplicate", list(range(self.size)), timeout)
        assert copy is not None
        return copy

    def close(self) -> None:
        """Release the backend's resources; later calls raise. Collective. Closing twice is fine."""
        if self._failure is None:
            self._staging.begin_all()
            self._failure = CommunicationError("it was closed")
            self._release()

    @abstractmethod
    def _start_all_to_all(self, call: Call, output: Tensor, input: Tensor, sizes: Sizes) -> Pending:
        """Start an all-to-all of flat uint8 tensors, of equal chunks or ``sizes``."""

    @abstractmethod
    def _start_all_gather(self, call: Call, output: Tensor, input: Tensor, sizes: Sizes) -> Pending:
        """Start an all-gather of flat uint8 tensors, equal ones or of ``sizes``."""

    @abstractmethod
    def _start_broadcast(self, call: Call, tensor: Tensor, root: int) -> Pending:
        """Start a broadcast of a flat uint8 tensor."""

    @abstractmethod
    def _start_all_reduce(self, call: Call, tensor: Tensor, op: ReduceOp) -> Pending:
        """Start an all-reduce of a flat tensor; ``op`` is sum, max or min."""

    @abstractmethod
    def _subgroup(self, members: list[int], number: int, timeout: float) -> Communicator:
        """Make a communicator of these ranks in this order, with this timeout. Called by the members only.

        ``number`` is the same for all of them and used once in this communicator's life.
        """

    @abstractmethod
    def _roll_call(self, call: Call) -> RollCall:
        """Tell all ranks that ``call`` failed here, and ask where they stand."""

    def _alarmed(self) -> bool:
        """Whether another rank has opened a roll call."""
        return False

    def _release(self) -> None:
        """Free what the backend holds."""

    def _leave_in_flight(self) -> None:
        """Keep moving what has been started: the caller goes on and waits for it later."""

    def _abandon(self) -> None:
        """Prepare for a process that ends with transfers of this communicator unfinished."""

    def _needs_staging(self, device: torch.device, *, reduction: bool) -> bool:
        """Whether tensors on ``device`` travel through pinned host memory. Raises for an unusable device."""
        return False

    @property
    def control_device(self) -> torch.device:
        """Where control messages must lie for the backend to carry them."""
        return torch.device("cpu")

    def _gather_on_host(self, name: str, mine: Tensor) -> Tensor:
        """Gather equal control messages of all ranks, and wait on the host until they are here."""
        mine = mine.to(self.control_device)
        everyone = torch.empty(self.size * mine.numel(), dtype=mine.dtype, device=mine.device)
        self._move(name, self._start_all_gather, everyone, mine, async_op=False)
        return everyone.cpu()

    def _move(
        self, name: str, start: Move, output: Tensor, input: Tensor, async_op: bool, more: str = "", sizes: Sizes = None
    ) -> Work:
        """Issue a collective that only moves bytes, so that any dtype travels on any backend."""
        if self.size == 1:
            return self._complete_alone(name, output, input)
        source, target = byte_view(input), byte_view(output)
        staged = self._needs_staging(source.device, reduction=False)
        wire_source, arrived = bring_to_host(source) if staged else (source, None)
        if input is output:
            wire_target = wire_source
        else:
            wire_target = torch.empty_like(target, device="cpu", pin_memory=True) if staged else target

        chunks = None if sizes is None else [one * input.element_size() for one in sizes]
        sent = None if chunks is None or name == "all_gather" else source.nbytes - chunks[self.rank]

        def begin(call: Call) -> Pending:
            pending = start(call, wire_target, wire_source, chunks)
            if staged:
                return Finishing(pending, lambda: target.copy_(wire_target, non_blocking=True))
            return pending

        signature = f"{name}{more} of {amount(input, sizes)}"
        return self._issue(name, signature, source.nbytes, begin, async_op, arrived, sent)

    def _complete_alone(self, name: str, output: Tensor, input: Tensor) -> Work:
        """Carry out a collective of the only rank there is: nothing is sent."""
        if self._failure is not None:
            self._raise_earlier_failure()
        self._needs_staging(input.device, reduction=False)  # raises for a device that the backend cannot serve
        self._sequence += 1
        if output is not input:
            output.detach().view(-1).copy_(input.detach().view(-1))
        self.traffic.add(name, 0)
        return _COMPLETED

    def _issue(
        self,
        name: str,
        signature: str,
        nbytes: int,
        start: Start,
        async_op: bool,
        arrived: torch.Event | None = None,
        sent: int | None = None,
    ) -> Work:
        """Start a collective; one whose tensors are staged when they have ``arrived``, and before any later one.
        ``sent``: bytes to count, if they do not follow from the input's."""
        self._raise_earlier_failure()
        self._sequence += 1
        call = Call(self._sequence, signature)
        if arrived is not None:

            def start_staged() -> Pending:
                pending = start(call)
                self._leave_in_flight()
                return pending

            pending = self._staging.follow(arrived, start_staged)
        else:
            self._staging.begin_all()
            with _Failures(self, call):
                pending = start(call)
        self.traffic.add(name, sent_bytes(name, nbytes, self.size) if sent is None else sent)
        work = Work(pending, partial(self._wait, call))
        if async_op:
            self._leave_in_flight()
        else:
            work.wait()
        return work

    def _wait(self, call: Call, pending: Pending, timeout: float | None) -> None:
        """Wait for a transfer of ``call``, for ``timeout`` seconds or, with None, for the communicator's own."""
        self._raise_earlier_failure()
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while True:
            remaining = deadline - time.monotonic()
            with _Failures(self, call):
                if pending.wait(max(0.0, min(_ALARM_INTERVAL, remaining))):
                    return
            if remaining <= 0:
                raise self._fail(call, timeout=limit)
            if self._alarmed():
                raise self._fail(call, cause="another rank reported a failure")

    def _make_group(self, name: str, members: list[int] | None, timeout: float | None = None) -> Communicator | None:
        """Make a group on its members; the other ranks only count it."""
        self._raise_earlier_failure()
        self._staging.begin_all()
        self._sequence += 1
        if members is None:
            return None
        with _Failures(self, Call(self._sequence, name)):
            return self._subgroup(members, self._sequence, self.timeout if timeout is None else timeout)

    def _raise_earlier_failure(self) -> None:
        if self._failure is not None:
            raise CommunicationError(
                f"this communicator can no longer be used: {self._failure}",
                ranks=self._failure.ranks,
                collective=self._failure.collective,
            ) from self._failure

    def _fail(self, call: Call, *, timeout: float | None = None, cause: object = None) -> CommunicationError:
        roll_call = self._roll_call(call)
        self._abandon()
        self._failure = describe_failure(call, self.rank, self.global_ranks, roll_call, timeout, cause)
        return self._failure


def _leave_to_parent() -> None:
    """In a fork: refuse to talk to other ranks, and keep destructors from waiting for threads that the parent has."""
    for one in list(_LIVING):
        one._failure = fork_error(os.getppid()) if one.size > 1 else one._failure
        one._abandon()


os.register_at_fork(after_in_child=_leave_to_parent)


class _Failures:
    """Turns what the transport raises into a ``CommunicationError`` that names ranks, and has it remembered.

    No generator: one is entered twice a collective, which in a step of many buckets is a cost that shows.
    """

    __slots__ = ("_call", "_communicator")

    def __init__(self, communicator: Communicator, call: Call) -> None:
        self._communicator = communicator
        self._call = call

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CommunicationError):
            self._communicator._failure = error
        elif isinstance(error, self._communicator._transport_errors):
            raise self._communicator._fail(self._call, cause=error) from error
