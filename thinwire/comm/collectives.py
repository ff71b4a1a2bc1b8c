"""One collective: its arguments, refused in one place so that all backends refuse the same; its handle in flight; what
is counted of it; staging through host memory.

A wrong argument must fail at the call, before any rank sends: afterwards it can only hang or corrupt. A backend
supplies a ``Pending``; the communicator that started it says how a ``Work`` waits for it: with a timeout, an eye on
other ranks' alarms, and good errors.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from thinwire.comm.errors import CommunicationError

ReduceOp = Literal["sum", "mean", "max", "min"]
Sizes = Sequence[int] | None
"""Of the chunk that each rank gets in an all-to-all, or gives in an all-gather; None where all are equal."""

_LONGEST_AMOUNT = 160
"""Of what names a call, which has to fit where ranks tell each other of theirs."""

_REDUCIBLE = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)


def check_tensor(collective: str, name: str, tensor: Tensor) -> None:
    """Refuse what has no flat, dense memory: TypeError for non-tensors, ValueError for the rest."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{collective}: {name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{collective}: {name} has layout {tensor.layout}; make it dense with .to_dense()")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{collective}: {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
            "contiguous; pass a .contiguous() copy, and copy the result back if it is an output"
        )


def check_chunks(collective: str, output: Tensor, input: Tensor, sizes: Sizes, rank: int, ranks: int) -> None:
    """Check output and input of an all-to-all or all-gather of ``ranks`` chunks, equal ones or of ``sizes``: both dense
    and contiguous, one dtype, one device, and no memory in common, but for the input that is its equal chunk of the
    output of an all-gather."""
    check_tensor(collective, "output", output)
    check_tensor(collective, "input", input)
    if output.dtype != input.dtype:
        raise TypeError(f"{collective}: output is {output.dtype} but input is {input.dtype}; use one dtype")
    if output.device != input.device:
        raise ValueError(f"{collective}: output is on {output.device} but input is on {input.device}")
    gathers = collective == "all_gather"
    if sizes is None:
        output_numel, told = (ranks if gathers else 1) * input.numel(), f"for an input of {input.numel()}"
    else:
        input_numel, output_numel = _numels_of(collective, sizes, rank, ranks)
        told = f"on rank {rank} for sizes {sizes!r}"
        if input.numel() != input_numel:
            raise ValueError(f"{collective}: input has {input.numel()} elements, expected {input_numel} {told}")
    if output.numel() != output_numel:
        raise ValueError(f"{collective}: output has {output.numel()} elements, expected {output_numel} {told}")
    if sizes is None and not gathers and input.numel() % ranks:
        raise ValueError(
            f"{collective}: {input.numel()} elements do not divide among {ranks} ranks; pad them to a multiple"
        )
    if output.untyped_storage().data_ptr() == input.untyped_storage().data_ptr():
        if gathers and sizes is None and input.data_ptr() == output.data_ptr() + rank * input.nbytes:
            return
        first_end = min(one.data_ptr() + one.nbytes for one in (output, input))
        if max(output.data_ptr(), input.data_ptr()) < first_end:
            raise ValueError(f"{collective}: output and input share memory; give it two separate tensors")


def _numels_of(collective: str, sizes: Sequence[int], rank: int, ranks: int) -> tuple[int, int]:
    """Elements of a rank's input and output in chunks of ``sizes``."""
    counts = sizes if isinstance(sizes, Sequence) else [None]
    if any(isinstance(size, bool) or not isinstance(size, int) for size in counts):
        raise TypeError(f"{collective}: sizes must be a list of whole numbers of elements, not {sizes!r}")
    if len(sizes) != ranks or min(sizes) < 0:
        raise ValueError(f"{collective}: sizes must be {ranks} numbers from 0, one a rank, not {sizes!r}")
    every, own = sum(sizes), sizes[rank]
    return (own, every) if collective == "all_gather" else (every, ranks * own)


def cut(tensor: Tensor, sizes: Sizes, ranks: int) -> Sequence[Tensor]:
    """The chunks of a flat tensor: of ``sizes``, or so many equal ones."""
    return tensor.chunk(ranks) if sizes is None else torch.split(tensor, list(sizes))


def amount(tensor: Tensor, sizes: Sizes = None) -> str:
    """How much a collective carries, in words that are the same on every rank."""
    numbers = str(tensor.numel()) if sizes is None else "+".join(map(str, sizes))
    if len(numbers) > _LONGEST_AMOUNT and sizes is not None:
        numbers = f"{sum(sizes)} in {len(sizes)} chunks"
    return f"{numbers} {str(tensor.dtype).removeprefix('torch.')}"


def check_reduction(tensor: Tensor, op: str) -> None:
    """Check that every backend can reduce this dtype with this op."""
    if op not in get_args(ReduceOp):
        raise ValueError(f"all_reduce: unknown op {op!r}; expected one of {', '.join(get_args(ReduceOp))}")
    if tensor.dtype not in _REDUCIBLE:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in _REDUCIBLE)
        raise TypeError(f"all_reduce: cannot reduce {tensor.dtype}; supported are {supported}")
    if op == "mean" and not tensor.is_floating_point():
        raise TypeError(f"all_reduce: mean of {tensor.dtype} is not exact; use 'sum', or convert to a float")


def flat_view(tensor: Tensor) -> Tensor:
    """A contiguous tensor as a flat one."""
    # Not view(-1): a contiguous tensor of one element may have any stride, which byte views refuse.
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def byte_view(tensor: Tensor) -> Tensor:
    """A contiguous tensor as flat bytes."""
    if tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.numel() > 1:
        return tensor
    return flat_view(tensor).view(torch.uint8)


def check_rank(collective: str, root: int, size: int) -> None:
    """Check that ``root`` is a rank of a communicator of ``size``."""
    if isinstance(root, bool) or not isinstance(root, int):
        raise TypeError(f"{collective}: root must be an int, not {type(root).__name__}")
    if not 0 <= root < size:
        raise ValueError(f"{collective}: root is {root}, expected 0 to {size - 1}")


def check_timeout(timeout: float) -> None:
    """Check that a timeout is a positive number of seconds."""
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")


class Pending(Protocol):
    """A transfer that a backend has started."""

    def done(self) -> bool:
        """Whether it is over, well or badly; drives progress and never raises."""

    def wait(self, seconds: float) -> bool:
        """Block for at most ``seconds``; False if it is still running. Raises what the transport raises."""


class Finishing:
    """A pending transfer followed by a local action on this rank: unstaging, or dividing a sum."""

    def __init__(self, pending: Pending, action: Callable[[], object]) -> None:
        self._pending = pending
        self._action = action

    def done(self) -> bool:
        """Whether the transfer is over; the action runs in ``wait``."""
        return self._pending.done()

    def wait(self, seconds: float) -> bool:
        """Wait for the transfer, then act."""
        if not self._pending.wait(seconds):
            return False
        self._action()
        return True


class Work:
    """Handle of an asynchronous collective. Its tensors are valid, and may be touched, after ``wait``."""

    def __init__(
        self,
        pending: Pending | None = None,
        wait_for: Callable[[Pending, float | None], None] = lambda pending, timeout: None,
    ) -> None:
        """`pending`: None where it is over already. `wait_for`: waits for it for so many seconds."""
        self._pending = pending
        self._wait_for = wait_for
        self._error: CommunicationError | None = None

    def is_completed(self) -> bool:
        """Whether ``wait`` would return, or raise, at once. On MPI this also drives progress."""
        return self._pending is None or self._error is not None or self._pending.done()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the collective is over; for NCCL, make the current CUDA stream wait for it.

        ``timeout`` in seconds, by default the communicator's. Raises ``CommunicationTimeout`` when it
        passes and ``CommunicationError`` when a rank or the transport failed; either one is final, for
        the whole communicator. Use ``is_completed`` to look without that risk.
        """
        if self._error is not None:
            raise self._error
        if self._pending is None:
            return
        try:
            self._wait_for(self._pending, timeout)
        except CommunicationError as error:
            self._error = error
            raise
        self._pending = None


class Traffic:
    """What one communicator made this rank send since it was created or last reset."""

    def __init__(self) -> None:
        self.bytes_by_collective: Counter[str] = Counter()
        self.calls_by_collective: Counter[str] = Counter()

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this rank in all collectives."""
        return self.bytes_by_collective.total()

    @property
    def calls(self) -> int:
        """Collectives issued by this rank."""
        return self.calls_by_collective.total()

    def add(self, collective: str, nbytes: int) -> None:
        """Record one call of ``collective`` that sends ``nbytes`` bytes."""
        self.bytes_by_collective[collective] += nbytes
        self.calls_by_collective[collective] += 1

    def copy(self) -> Traffic:
        """What was counted so far."""
        copied = Traffic()
        copied.include(self)
        return copied

    def since(self, earlier: Traffic) -> Traffic:
        """What was counted after `earlier` was copied."""
        found = Traffic()
        found.bytes_by_collective = self.bytes_by_collective - earlier.bytes_by_collective
        found.calls_by_collective = self.calls_by_collective - earlier.calls_by_collective
        return found

    def include(self, other: Traffic) -> None:
        """Count what `other` has counted, too."""
        self.bytes_by_collective.update(other.bytes_by_collective)
        self.calls_by_collective.update(other.calls_by_collective)

    def reset(self) -> None:
        """Start counting from zero again."""
        self.bytes_by_collective.clear()
        self.calls_by_collective.clear()

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}: {count} B" for name, count in sorted(self.bytes_by_collective.items()))
        return f"Traffic({self.bytes_sent} B sent{'; ' + counts if counts else ''})"


# Staging: an accelerator's tensors over a transport that reads host memory only


def bring_to_host(tensor: Tensor) -> tuple[Tensor, torch.Event]:
    """A page-locked copy of `tensor`, and the event after which it is whole."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    arrived = torch.Event(tensor.device)
    arrived.record()
    return copy, arrived


class Staging:
    """The collectives of one communicator that have not begun, in the order of their calls, which is every rank's.

    One begins when it is waited for, or at any later call by which what it sends has arrived.
    """

    def __init__(self) -> None:
        self.waiting: deque[_Staged] = deque()

    def follow(self, arrived: torch.Event, begin: Callable[[], Pending]) -> Pending:
        """Begin after all others, once `arrived` has happened."""
        staged = _Staged(self, arrived, begin)
        self.waiting.append(staged)
        self.begin_arrived()
        return staged

    def begin_arrived(self) -> None:
        """Begin those that can begin without a wait."""
        while self.waiting and self.waiting[0].arrived.query():
            self.waiting.popleft().begin()

    def begin_all(self) -> None:
        """Begin all, so that what is begun next comes after them on every rank."""
        while self.waiting:
            self.waiting.popleft().begin()


class _Staged:
    """A Pending of a collective that may not have begun."""

    def __init__(self, staging: Staging, arrived: torch.Event, begin: Callable[[], Pending]) -> None:
        self._staging = staging
        self.arrived = arrived
        self._begin = begin
        self._pending: Pending | None = None
        self._error: Exception | None = None

    def begin(self) -> None:
        """Begin, waiting for what is sent; what the transport raises is for who waits for this one."""
        self.arrived.synchronize()
        try:
            self._pending = self._begin()
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        """Whether it is over; begins those that can."""
        self._staging.begin_arrived()
        return self._error is not None or (self._pending is not None and self._pending.done())

    def wait(self, seconds: float) -> bool:
        """Begin it and those before it, and wait for at most so many seconds; False if it is still running."""
        while self in self._staging.waiting:
            self._staging.waiting.popleft().begin()
        if self._error is not None:
            raise self._error
        assert self._pending is not None
        return self._pending.wait(seconds)
