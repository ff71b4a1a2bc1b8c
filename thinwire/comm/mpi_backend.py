"""Communication over MPI through mpi4py: tensors as buffers, non-blocking collectives, any communicator.

For Ethernet and HPC clusters that have an MPI, and for its networks that neither Gloo nor NCCL can use.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.collectives import Pending, ReduceOp, Sizes, cut
from thinwire.comm.communicator import Communicator
from thinwire.comm.errors import ROLL_CALL_SECONDS, Call, RollCall
from thinwire.comm.mpi_progress import SLEEP_SECONDS, Progress, Transfer
from thinwire.comm.mpi_rounds import MPI, Rounds, address
from thinwire.comm.pairwise import LEAST_CHUNK_BYTES

_LARGEST_COUNT = 2**31 - 1
"""Most elements that one MPI call before MPI-4 can count."""

_LARGEST_TAG = 2**15 - 1
"""That every MPI takes."""

_TOKEN_BYTES = 256

_CLOSING_SECONDS = 5.0
"""How long a communicator that is closed moves what was not waited for."""

_DATATYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
}
_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


class MPICommunicator(Communicator):
    """A communicator over the ranks of ``comm``, by default ``MPI.COMM_WORLD``. Collective.

    It works on duplicates, so that its messages never mix with the caller's. An MPI moves data while
    a thread calls it: ours does so until every transfer is over. Where the MPI allows calls from one thread
    only, which is a ``RuntimeWarning`` on rank 0, with ``progress=False`` or THINWIRE_MPI_PROGRESS=0, and, unless
    it is asked for, where MPI reads GPU memory itself, a transfer moves in ``wait``, in ``Work.is_completed`` and in
    other calls of MPI. ``progress=True`` raises ``RuntimeError`` where there can be no such thread.

    CUDA tensors are handed to MPI when it is CUDA-aware, else they travel through pinned host memory, as
    those of all_reduce always do (Open MPI's non-blocking reductions cannot read a GPU). ``cuda_aware``
    overrides what the MPI says of itself; so does the environment variable THINWIRE_MPI_CUDA_AWARE=0 or 1.
    """

    _transport_errors = (MPI.Exception,)

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        timeout: float | None = None,
        *,
        cuda_aware: bool | None = None,
        progress: bool | Progress | None = None,
    ) -> None:
        parent = MPI.COMM_WORLD if comm is None else comm
        if parent == MPI.COMM_NULL or parent.Is_inter():
            raise ValueError("MPICommunicator needs an intracommunicator of which this process is a member")
        super().__init__(parent.Get_rank(), parent.Get_size(), "mpi", timeout)
        self.global_ranks = _ranks_in_world(parent)
        self._comm = parent.Dup()
        self._control = parent.Dup()
        for own in (self._comm, self._control):
            own.Set_errhandler(MPI.ERRORS_RETURN)
        self._cuda_aware = _is_cuda_aware() if cuda_aware is None else cuda_aware
        self._progress = progress if isinstance(progress, Progress) else self._make_progress(progress)
        self._rounds = self._make_rounds()
        self._in_flight: set[Transfer] = set()
        self._tokens: list[MPI.Request] = []

    def _start_all_to_all(self, call: Call, output: Tensor, input: Tensor, sizes: Sizes) -> Pending:
        chunk = max(sizes or [input.nbytes // self.size])
        if self._streams_would_meet(chunk):
            return self._start_rounds(call, output.chunk(self.size), cut(input, sizes, self.size))
        if sizes is None:
            return self._start_blocks(chunk, self._comm.Ialltoall, input, output)
        return self._start_unequal(input, _stretches(sizes), output, _stretches([sizes[self.rank]] * self.size))

    def _start_all_gather(self, call: Call, output: Tensor, input: Tensor, sizes: Sizes) -> Pending:
        if self._streams_would_meet(max(sizes or [input.nbytes])):
            return self._start_rounds(call, cut(output, sizes, self.size), [input] * self.size)
        if sizes is not None:
            return self._start_unequal(input, [_stretch(0, input.nbytes) for _ in sizes], output, _stretches(sizes))
        if input.data_ptr() == output.data_ptr() + self.rank * input.nbytes:
            return self._start_blocks(input.nbytes, partial(self._comm.Iallgather, MPI.IN_PLACE), output)
        return self._start_blocks(input.nbytes, self._comm.Iallgather, input, output)

    def _start_broadcast(self, call: Call, tensor: Tensor, root: int) -> Pending:
        return self._start_blocks(tensor.nbytes, partial(self._comm.Ibcast, root=root), tensor)

    def _start_all_reduce(self, call: Call, tensor: Tensor, op: ReduceOp) -> Pending:
        requests = []
        half = tensor.dtype not in _DATATYPES
        for first in range(0, tensor.numel(), _LARGEST_COUNT):
            piece = tensor[first : first + _LARGEST_COUNT]
            datatype = MPI.UINT16_T if half else _DATATYPES[tensor.dtype]
            reduction = _half_precision_op(tensor.dtype, op) if half else _OPS[op]
            target = [address(piece), piece.numel(), datatype]
            requests.append(self._comm.Iallreduce(MPI.IN_PLACE, target, reduction))
        return self._track(requests, tensor)

    def _start_blocks(self, nbytes: int, start: Callable[..., MPI.Request], *tensors: Tensor) -> Pending:
        """Start a transfer of blocks of ``nbytes`` bytes of these tensors."""
        if nbytes == 0:
            return self._track([], *tensors)
        _await_streams(*tensors)
        if nbytes <= _LARGEST_COUNT:
            return self._track([start(*([address(one), nbytes, MPI.BYTE] for one in tensors))], *tensors)
        block = _stretch(0, nbytes)
        request = start(*([address(one), 1, block] for one in tensors))
        block.Free()
        return self._track([request], *tensors)

    def _start_unequal(
        self, input: Tensor, sent: list[MPI.Datatype], output: Tensor, received: list[MPI.Datatype]
    ) -> Pending:
        """Start to send each rank what ``sent`` says of ``input``, and to receive so; the types are freed."""
        _await_streams(input, output)
        request = self._comm.Ialltoallw([address(input), sent], [address(output), received])
        for one in (*sent, *received):
            one.Free()
        return self._track([request], input, output)

    def _streams_would_meet(self, nbytes: int) -> bool:
        """Whether messages of so many bytes to every other rank go in rounds."""
        return self._rounds is not None and self.size > 2 and nbytes >= LEAST_CHUNK_BYTES

    def _start_rounds(self, call: Call, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Pending:
        assert self._rounds is not None
        _await_streams(*received[:1], *sent[:1])
        # Ranks at different calls must not take each other's messages: they find out when their time is over.
        exchange = self._rounds.start(received, sent, zlib.crc32(call.encode()) & _LARGEST_TAG)
        return Transfer(exchange.test, (received[0], sent[0]), self._in_flight, self._progress, short=False)

    def _track(self, requests: list[MPI.Request], *tensors: Tensor) -> Pending:
        return Transfer(partial(MPI.Request.Testall, requests), tensors, self._in_flight, self._progress)

    def _subgroup(self, members: list[int], number: int, timeout: float) -> Communicator:
        own = self._comm.Get_group()
        group = own.Incl(members)
        comm = self._comm.Create_group(group)
        made = MPICommunicator(comm, timeout, cuda_aware=self._cuda_aware, progress=self._progress or False)
        for handle in (comm, group, own):
            handle.Free()
        return made

    def _alarmed(self) -> bool:
        return bool(self._control.Iprobe(MPI.ANY_SOURCE))

    def _roll_call(self, call: Call) -> RollCall:
        token = call.encode()[:_TOKEN_BYTES].ljust(_TOKEN_BYTES, b"\0")
        others = [rank for rank in range(self.size) if rank != self.rank]
        answers: dict[int, Call] = {self.rank: call}
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        try:
            self._tokens = [self._control.Isend([token, MPI.BYTE], rank) for rank in others]
            while len(answers) < self.size and time.monotonic() < deadline:
                status = MPI.Status()
                if self._control.Iprobe(MPI.ANY_SOURCE, status=status):
                    message = bytearray(_TOKEN_BYTES)
                    self._control.Recv([message, MPI.BYTE], status.Get_source())
                    answers[status.Get_source()] = Call.decode(bytes(message).rstrip(b"\0"))
                else:
                    time.sleep(SLEEP_SECONDS)
        except MPI.Exception as error:
            return RollCall(answers, (), f"the roll call failed too: {error}")
        return RollCall(answers, tuple(rank for rank in others if rank not in answers))

    def _make_progress(self, wanted: bool | None) -> Progress | None:
        """The thread that drives transfers, unless it is unwanted or this MPI forbids it."""
        if wanted is None:
            wanted = _told("THINWIRE_MPI_PROGRESS")
        reads_gpus = self._cuda_aware and torch.cuda.is_available()
        if wanted is False or (wanted is None and reads_gpus):
            return None
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            return Progress()
        lacking = (
            "MPI runs without MPI_THREAD_MULTIPLE, so that no thread can move transfers while the process computes: "
            "they move only while MPI is called. Take an MPI built with it, and leave mpi4py.rc.thread_level at "
            "'multiple'"
        )
        if wanted:
            raise RuntimeError(f"{lacking}; or do not ask for progress")
        if self.rank == 0:
            warnings.warn(f"{lacking}; THINWIRE_MPI_PROGRESS=0 silences this", RuntimeWarning, stacklevel=3)
        return None

    def _make_rounds(self) -> Rounds | None:
        """For large messages, where every rank has a thread that drives them: MPI knows nothing of the next round."""
        driven = bytearray([self._progress is not None])
        self._comm.Allreduce(MPI.IN_PLACE, [driven, MPI.UINT8_T], MPI.MIN)
        if self._progress is None or not driven[0]:
            return None
        rounds = Rounds(self._comm)
        self._progress.watched.add_rounds(rounds)
        return rounds

    def _leave_in_flight(self) -> None:
        if self._progress is not None:
            self._progress.watch(self._in_flight)

    def _abandon(self) -> None:
        if self.size == 1 or self._failure is not None:  # in a fork locks may be held for ever
            return
        if self._progress is not None:
            self._progress.watched.remove(self._in_flight)
        if self._rounds is not None:
            self._rounds.stop()

    def _release(self) -> None:
        if not MPI.Is_finalized():
            deadline = time.monotonic() + _CLOSING_SECONDS
            while self._rounds is not None and self._rounds.busy and time.monotonic() < deadline:
                self._rounds.look()
                time.sleep(SLEEP_SECONDS)
            self._comm.Free()
            self._control.Free()

    def _needs_staging(self, device: torch.device, *, reduction: bool) -> bool:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"MPI takes tensors on cpu or cuda, not on {device}")
        return device.type == "cuda" and (reduction or not self._cuda_aware)


def install_abort_hook() -> None:
    """Make an uncaught exception in this process end the whole MPI job, after the usual traceback.

    Without it the other ranks would wait for this one forever. Installing it twice is fine.
    """
    if not isinstance(sys.excepthook, _AbortOnException):
        sys.excepthook = _AbortOnException(sys.excepthook)


class _AbortOnException:
    def __init__(self, previous: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._previous = previous
        self._process = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._previous(kind, error, traceback)
        sys.stdout.flush()
        sys.stderr.flush()
        if os.getpid() == self._process and not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(1)


def _await_streams(*tensors: Tensor) -> None:
    """Wait until GPUs are done with ``tensors``, which MPI is about to touch."""
    for tensor in tensors:
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()


def _stretch(first: int, nbytes: int) -> MPI.Datatype:
    """So many bytes from an offset on, which may be more than a count can hold."""
    pieces, rest = divmod(nbytes, _LARGEST_COUNT)
    piece = MPI.BYTE.Create_contiguous(_LARGEST_COUNT)
    places = [first, first + pieces * _LARGEST_COUNT]
    made = MPI.Datatype.Create_struct([pieces, rest], places, [piece, MPI.BYTE]).Commit()
    piece.Free()
    return made


def _stretches(sizes: Sequence[int]) -> list[MPI.Datatype]:
    """Stretches of so many bytes, end to end."""
    return [_stretch(first, size) for first, size in zip(accumulate(sizes, initial=0), sizes, strict=False)]


@cache
def _half_precision_op(dtype: torch.dtype, op: ReduceOp) -> MPI.Op:
    """Reduction of 16-bit floats, which MPI does not know: it carries them as 16-bit integers."""

    def combine(incoming: Any, accumulated: Any, _: MPI.Datatype) -> None:
        left = torch.frombuffer(accumulated, dtype=dtype)
        right = torch.frombuffer(incoming, dtype=dtype)
        if op == "sum":
            left += right
        else:
            left.copy_(torch.maximum(left, right) if op == "max" else torch.minimum(left, right))

    return MPI.Op.Create(combine, commute=True)


def _ranks_in_world(comm: MPI.Intracomm) -> list[int]:
    """The ranks of ``comm`` as MPI.COMM_WORLD numbers them; its own of processes that MPI has spawned since."""
    own, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    found = MPI.Group.Translate_ranks(own, list(range(own.size)), world)
    ranks = [rank if other == MPI.UNDEFINED else other for rank, other in enumerate(found)]
    own.Free()
    world.Free()
    return ranks


def _is_cuda_aware() -> bool:
    """Whether this MPI can read GPU memory, as the environment or the library itself says."""
    told = _told("THINWIRE_MPI_CUDA_AWARE")
    if told is not None:
        return told
    try:
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return False
    return bool(query())


def _told(variable: str) -> bool | None:
    """What the environment says of a switch; None when it says nothing."""
    value = os.environ.get(variable)
    if value not in (None, "0", "1"):
        raise ValueError(f"{variable} should be 0 or 1, not {value!r}")
    return None if value is None else value == "1"
