"""Ranks as threads of one process: for tests, notebooks, and many virtual ranks on one GPU.

The last rank to arrive at a collective carries it out for all, in rank order, so results never vary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.comm.collectives import Pending, ReduceOp, Sizes, check_timeout, cut
from thinwire.comm.communicator import Communicator
from thinwire.comm.errors import Call, CommunicationError, RollCall, name_ranks

Result = TypeVar("Result")

_context = threading.local()


def run(fn: Callable[[Communicator], Result], size: int, timeout: float = 60.0) -> list[Result]:
    """Call ``fn(comm)`` on ``size`` threads, one a rank, and return their results in rank order.

    Inside ``fn``, ``thinwire.comm.init()`` returns the thread's own communicator. When a rank raises, the
    others get a ``CommunicationError`` that names it, and ``run`` raises the first rank's exception.
    ``timeout`` in seconds for each collective. The random generator of torch is shared by all threads:
    give each rank its own ``torch.Generator``. A rank's backwards run on its own thread, on a GPU too.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, not {size}")
    check_timeout(timeout)
    job = _Job(size)
    world = _Group(job, tuple(range(size)))
    results: dict[int, Result] = {}
    # A new thread would run its first operations with torch's default number, and so round them differently.
    compute_threads = torch.get_num_threads()

    def live(rank: int) -> None:
        torch.set_num_threads(compute_threads)
        _context.communicator = ThreadCommunicator(world, rank, timeout)
        try:
            # torch has one thread for all backwards on a device: there the ranks' hooks would wait for each other.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(_context.communicator)
        except BaseException as error:
            job.leave(rank, error)
        else:
            job.leave(rank)

    # Daemons, so that a rank stuck outside of any collective cannot keep the process alive.
    threads = [threading.Thread(target=live, args=(r,), name=f"rank {r}", daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    failure = job.wait_for_all(timeout)
    if failure is not None:
        rank, error = failure
        error.add_note(f"raised on rank {rank} of {size}")
        raise error
    return [results[rank] for rank in range(size)]


def current() -> Communicator | None:
    """The communicator of the calling thread inside ``run``, else None."""
    return getattr(_context, "communicator", None)


def single(timeout: float) -> Communicator:
    """Make a communicator of one rank, for a process on its own."""
    return ThreadCommunicator(_Group(_Job(1), (0,)), 0, timeout, backend="single")


class _Job:
    """What all ranks of one ``run`` share: one lock, who has left, and the first failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        self._ended = threading.Condition(lock)  # apart: who waits for the end need not wake at every meeting
        self.left: set[int] = set()
        self.failure: tuple[int, BaseException] | None = None

    def leave(self, rank: int, error: BaseException | None = None) -> None:
        with self.changed:
            self.left.add(rank)
            if error is not None and self.failure is None:
                self.failure = (rank, error)
            self.changed.notify_all()
            self._ended.notify_all()

    def wait_for_all(self, timeout: float) -> tuple[int, BaseException] | None:
        """Wait until all ranks have left; once one has failed, for at most ``timeout`` seconds more."""
        with self._ended:
            self._ended.wait_for(lambda: self.failure is not None or len(self.left) == self.size)
            self._ended.wait_for(lambda: len(self.left) == self.size, timeout)
            return self.failure


@dataclass
class _Part:
    """One rank's tensors in a collective, with what its GPU must reach before and after it."""

    output: Tensor
    input: Tensor
    ready: torch.cuda.Event | None
    finished: torch.cuda.Event | None = None


@dataclass
class _Meeting:
    """One collective: who has come, and what came of it."""

    calls: dict[int, Call] = field(default_factory=dict)
    parts: dict[int, _Part] = field(default_factory=dict)
    done: bool = False
    mismatch: bool = False


class _Group:
    """The ranks of one communicator, as ranks of the job; its meetings by call number."""

    def __init__(self, job: _Job, members: tuple[int, ...]) -> None:
        self.job = job
        self.members = members
        self.meetings: dict[int, _Meeting] = {}
        self.position: dict[int, Call] = {}
        self._children: dict[tuple[int, tuple[int, ...]], _Group] = {}

    def child(self, number: int, members: tuple[int, ...]) -> _Group:
        """The group of ``members`` with this ``number``; the same object for all of them."""
        with self.job.changed:
            return self._children.setdefault((number, members), _Group(self.job, members))

    def attend(self, rank: int, call: Call, part: _Part) -> tuple[_Meeting, bool]:
        """Join the meeting of ``call``; True as well for the rank that completes it and must carry it out."""
        with self.job.changed:
            meeting = self.meetings.setdefault(call.sequence, _Meeting())
            meeting.calls[rank] = self.position[rank] = call
            meeting.parts[rank] = part
            meeting.mismatch = len(set(meeting.calls.values())) > 1
            full = len(meeting.parts) == len(self.members)
            if full:
                del self.meetings[call.sequence]
            if meeting.mismatch:
                self.job.changed.notify_all()
            return meeting, full and not meeting.mismatch


class _Attendance:
    """One rank's stake in a meeting."""

    def __init__(self, group: _Group, rank: int, meeting: _Meeting) -> None:
        self._group = group
        self._rank = rank
        self._meeting = meeting

    def done(self) -> bool:
        with self._group.job.changed:
            return self._meeting.done or self._failure() is not None

    def wait(self, seconds: float) -> bool:
        with self._group.job.changed:
            self._group.job.changed.wait_for(lambda: self._meeting.done or self._failure(), seconds)
            if not self._meeting.done:
                failure = self._failure()
                if failure is not None:
                    raise failure
                return False
        part = self._meeting.parts[self._rank]
        if part.finished is not None:
            torch.cuda.current_stream(part.output.device).wait_event(part.finished)
        return True

    def _failure(self) -> CommunicationError | None:
        """Why this meeting can never be held, if so."""
        call = self._meeting.calls[self._rank]
        if self._meeting.mismatch:
            where = "; ".join(
                f"rank {self._group.members[rank]} calls {other}" for rank, other in self._meeting.calls.items()
            )
            return CommunicationError(f"ranks are not at the same call: {where}", collective=call.signature)
        job = self._group.job
        if job.failure is not None:
            failed, error = job.failure
            ranks = error.ranks if isinstance(error, CommunicationError) else (failed,)
            return CommunicationError(
                f"{call} failed: rank {failed} raised {type(error).__name__}: {error}",
                ranks=ranks,
                collective=call.signature,
            )
        gone = [
            member
            for rank, member in enumerate(self._group.members)
            if member in job.left and rank not in self._meeting.parts
        ]
        if gone:
            message = f"{call} failed: {name_ranks(gone)} returned without joining it"
            return CommunicationError(message, ranks=tuple(gone), collective=call.signature)
        return None


class ThreadCommunicator(Communicator):
    """One thread's communicator. Tensors may be on any device; GPU ranks are ordered by CUDA events."""

    def __init__(self, group: _Group, rank: int, timeout: float, backend: str = "threads") -> None:
        super().__init__(rank, len(group.members), backend, timeout)
        self._group, self.global_ranks = group, group.members

    def _start_all_to_all(self, call: Call, output: Tensor, input: Tensor, sizes: Sizes) -> Pending:
        return self._meet(call, output, input, partial(_all_to_all, sizes=sizes))

    def _start_all_gather(self, call: Call, output: Tensor, input: Tensor, sizes: Sizes) -> Pending:
        return self._meet(call, output, input, partial(_all_gather, sizes=sizes))

    def _start_broadcast(self, call: Call, tensor: Tensor, root: int) -> Pending:
        return self._meet(call, tensor, tensor, partial(_broadcast, root=root))

    def _start_all_reduce(self, call: Call, tensor: Tensor, op: ReduceOp) -> Pending:
        return self._meet(call, tensor, tensor, partial(_all_reduce, op=op))

    def _subgroup(self, members: list[int], number: int, timeout: float) -> Communicator:
        group = self._group.child(number, tuple(self._group.members[rank] for rank in members))
        return ThreadCommunicator(group, members.index(self.rank), timeout, self.backend)

    def _roll_call(self, call: Call) -> RollCall:
        with self._group.job.changed:
            position = dict(self._group.position)
        answers = {rank: other for rank, other in position.items() if other.sequence >= call.sequence}
        return RollCall(answers, tuple(rank for rank in range(self.size) if rank not in answers))

    def _meet(self, call: Call, output: Tensor, input: Tensor, perform: Callable[[list[_Part]], None]) -> Pending:
        part = _Part(output, input, _mark_stream(input.device))
        meeting, complete = self._group.attend(self.rank, call, part)
        if complete:
            parts = [meeting.parts[rank] for rank in range(self.size)]
            devices = {one.output.device for one in parts}
            for ready in (one.ready for one in parts if one.ready is not None):
                for device in devices:
                    torch.cuda.current_stream(device).wait_event(ready)
            perform(parts)
            for one in parts:
                one.finished = _mark_stream(one.output.device)
            with self._group.job.changed:
                meeting.done = True
                self._group.job.changed.notify_all()
        return _Attendance(self._group, self.rank, meeting)


def _mark_stream(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


def _all_to_all(parts: list[_Part], sizes: Sizes) -> None:
    size = len(parts)
    inputs = [cut(one.input, sizes, size) for one in parts]
    for receiver, part in enumerate(parts):
        for sender, chunk in enumerate(part.output.chunk(size)):
            chunk.copy_(inputs[sender][receiver])


def _all_gather(parts: list[_Part], sizes: Sizes) -> None:
    for part in parts:
        for chunk, sender in zip(cut(part.output, sizes, len(parts)), parts, strict=True):
            chunk.copy_(sender.input)


def _broadcast(parts: list[_Part], root: int) -> None:
    for rank, part in enumerate(parts):
        if rank != root:
            part.output.copy_(parts[root].output)


def _all_reduce(parts: list[_Part], op: ReduceOp) -> None:
    total = parts[0].output.clone()
    for part in parts[1:]:
        other = part.output.to(total.device)
        if op == "sum":
            total += other
        else:
            total = torch.maximum(total, other) if op == "max" else torch.minimum(total, other)
    for part in parts:
        part.output.copy_(total)
