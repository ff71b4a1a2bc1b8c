"""Communication over MPI through mpi4py: tensors as buffers, non-blocking collectives, any communicator.

For Ethernet and HPC clusters that have an MPI, and for its networks that neither Gloo nor NCCL can use.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from thinwire.comm.checks import ReduceOp
from thinwire.comm.communicator import Communicator
from thinwire.comm.failure import ROLL_CALL_SECONDS, Call, RollCall
from thinwire.comm.work import Pending

__all__ = ["MPICommunicator", "install_abort_hook"]

_LARGEST_COUNT = 2**31 - 1
"""Most elements that one MPI call before MPI-4 can count."""

_YIELDS_BEFORE_SLEEP = 200
_SLEEP_SECONDS = 50e-6
_TOKEN_BYTES = 256

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
    somebody calls it: ``Work.is_completed`` between pieces of computation keeps a transfer going.

    CUDA tensors are handed to MPI when it is CUDA-aware, else they travel through pinned host memory, as
    those of all_reduce always do (Open MPI's non-blocking reductions cannot read a GPU). ``cuda_aware``
    overrides what the MPI says of itself; so does the environment variable THINWIRE_MPI_CUDA_AWARE=0 or 1.
    """

    _transport_errors = (MPI.Exception,)

    def __init__(
        self, comm: MPI.Intracomm | None = None, timeout: float = 300.0, *, cuda_aware: bool | None = None
    ) -> None:
        parent = MPI.COMM_WORLD if comm is None else comm
        if parent == MPI.COMM_NULL or parent.Is_inter():
            raise ValueError("MPICommunicator needs an intracommunicator of which this process is a member")
        super().__init__(parent.Get_rank(), parent.Get_size(), "mpi", timeout)
        self._comm = parent.Dup()
        self._control = parent.Dup()
        for own in (self._comm, self._control):
            own.Set_errhandler(MPI.ERRORS_RETURN)
        self._cuda_aware = _is_cuda_aware() if cuda_aware is None else cuda_aware
        self._in_flight: set[_MPIPending] = set()
        self._tokens: list[MPI.Request] = []

    def _start_all_to_all(self, call: Call, output: Tensor, input: Tensor) -> Pending:
        chunk = input.nbytes // self.size

        def start(block: MPI.Datatype, count: int) -> MPI.Request:
            return self._comm.Ialltoall([_buffer(input), count, block], [_buffer(output), count, block])

        return self._start_blocks(chunk, start, output, input)

    def _start_all_gather(self, call: Call, output: Tensor, input: Tensor) -> Pending:
        def start(block: MPI.Datatype, count: int) -> MPI.Request:
            return self._comm.Iallgather([_buffer(input), count, block], [_buffer(output), count, block])

        return self._start_blocks(input.nbytes, start, output, input)

    def _start_broadcast(self, call: Call, tensor: Tensor, root: int) -> Pending:
        def start(block: MPI.Datatype, count: int) -> MPI.Request:
            return self._comm.Ibcast([_buffer(tensor), count, block], root)

        return self._start_blocks(tensor.nbytes, start, tensor, tensor)

    def _start_all_reduce(self, call: Call, tensor: Tensor, op: ReduceOp) -> Pending:
        requests = []
        half = tensor.dtype not in _DATATYPES
        for first in range(0, tensor.numel(), _LARGEST_COUNT):
            piece = tensor[first : first + _LARGEST_COUNT]
            datatype = MPI.UINT16_T if half else _DATATYPES[tensor.dtype]
            reduction = _half_precision_op(tensor.dtype, op) if half else _OPS[op]
            target = [_buffer(piece), piece.numel(), datatype]
            requests.append(self._comm.Iallreduce(MPI.IN_PLACE, target, reduction))
        return self._track(requests, tensor)

    def _start_blocks(
        self, nbytes: int, start: Callable[[MPI.Datatype, int], MPI.Request], *tensors: Tensor
    ) -> Pending:
        """Start a transfer of blocks of ``nbytes`` bytes, given to ``start`` as a datatype and a count."""
        if nbytes == 0:
            return self._track([], *tensors)
        for tensor in tensors:
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
        if nbytes <= _LARGEST_COUNT:
            return self._track([start(MPI.BYTE, nbytes)], *tensors)
        block = _large_block(nbytes)
        request = start(block, 1)
        block.Free()
        return self._track([request], *tensors)

    def _track(self, requests: list[MPI.Request], *tensors: Tensor) -> Pending:
        pending = _MPIPending(requests, tensors, self._in_flight)
        self._in_flight.add(pending)
        return pending

    def _subgroup(self, members: list[int], number: int) -> Communicator:
        own = self._comm.Get_group()
        group = own.Incl(members)
        comm = self._comm.Create_group(group)
        made = MPICommunicator(comm, self.timeout, cuda_aware=self._cuda_aware)
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
                    time.sleep(_SLEEP_SECONDS)
        except MPI.Exception as error:
            return RollCall(answers, (), f"the roll call failed too: {error}")
        return RollCall(answers, tuple(rank for rank in others if rank not in answers))

    def _release(self) -> None:
        if not MPI.Is_finalized():
            self._comm.Free()
            self._control.Free()

    def _needs_staging(self, device: torch.device, *, reduction: bool) -> bool:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"MPI takes tensors on cpu or cuda, not on {device}")
        return device.type == "cuda" and (reduction or not self._cuda_aware)


class _MPIPending:
    """Requests in flight, with the tensors that MPI reads and writes until they are over."""

    def __init__(self, requests: list[MPI.Request], tensors: tuple[Tensor, ...], in_flight: set[_MPIPending]) -> None:
        self._requests = requests
        self._tensors = tensors
        self._in_flight = in_flight
        self._error: MPI.Exception | None = None

    def done(self) -> bool:
        try:
            over = self._error is not None or MPI.Request.Testall(self._requests)
        except MPI.Exception as error:
            self._error = error
            return True
        if over:
            self._in_flight.discard(self)
        return over

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        yields = 0
        while not self.done():
            if time.monotonic() >= deadline:
                return False
            yields += 1
            time.sleep(0 if yields < _YIELDS_BEFORE_SLEEP else _SLEEP_SECONDS)
        if self._error is not None:
            raise self._error
        return True


def install_abort_hook() -> None:
    """Make an uncaught exception in this process end the whole MPI job, after the usual traceback.

    Without it the other ranks would wait for this one forever. Installing it twice is fine.
    """
    if not isinstance(sys.excepthook, _AbortOnException):
        sys.excepthook = _AbortOnException(sys.excepthook)


class _AbortOnException:
    def __init__(self, previous: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._previous(kind, error, traceback)
        sys.stdout.flush()
        sys.stderr.flush()
        if not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(1)


def _buffer(tensor: Tensor) -> MPI.buffer:
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _large_block(nbytes: int) -> MPI.Datatype:
    """Datatype of ``nbytes`` contiguous bytes, more than a count can hold. The caller frees it."""
    pieces, rest = divmod(nbytes, _LARGEST_COUNT)
    piece = MPI.BYTE.Create_contiguous(_LARGEST_COUNT)
    block = MPI.Datatype.Create_struct([pieces, rest], [0, pieces * _LARGEST_COUNT], [piece, MPI.BYTE])
    piece.Free()
    return block.Commit()


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


def _is_cuda_aware() -> bool:
    """Whether this MPI can read GPU memory, as the environment or the library itself says."""
    told = os.environ.get("THINWIRE_MPI_CUDA_AWARE")
    if told is not None:
        if told not in ("0", "1"):
            raise ValueError(f"THINWIRE_MPI_CUDA_AWARE should be 0 or 1, not {told!r}")
        return told == "1"
    try:
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return False
    return bool(query())
