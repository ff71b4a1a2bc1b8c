"""What one launched rank does: ``job.py TASK ...``. Every task starts like a user's script, with ``init``."""

import os
import signal
import sys
import threading
import time
import warnings
from typing import Any

import pytest
import torch

from tests.comm.collectives_body import check_everything
from tests.refusing import refused
from thinwire import comm

JOB = ("-m", "tests.comm.job")
FAILURE_TIMEOUT = 2.0


def body(seed: str, backend: str = "") -> None:
    """All checks on the communicator that ``init`` finds, or on one over ``backend``."""
    warnings.simplefilter("error")
    world = comm.init(backend=backend or None, timeout=60.0)  # type: ignore[arg-type]
    check_everything(world, int(seed))
    # Whole lines at once: the ranks share one output.
    sys.stdout.write(f"rank {world.rank} of {world.size} passed over {world.backend}\n")


def over_gloo(seed: str) -> None:
    body(seed)
    turns()


def over_mpi(seed: str) -> None:
    """``body``, again on communicators of the user, with counts to be cut, beside other messages; then what MPI's
    transfers do on the way."""
    body(seed)
    from mpi4py import MPI

    from thinwire.comm import mpi_backend

    world = MPI.COMM_WORLD
    message = bytearray(3)
    received = world.Irecv(message, MPI.ANY_SOURCE, MPI.ANY_TAG)
    largest, mpi_backend._LARGEST_COUNT = mpi_backend._LARGEST_COUNT, 5
    for parent in (world, world.Split(world.rank % 2)):
        check_everything(comm.MPICommunicator(parent, timeout=60.0), int(seed))
    mpi_backend._LARGEST_COUNT = largest
    world.Send(b"abc", (world.rank + 1) % world.size)
    received.Wait()
    assert message == b"abc"
    os.environ["THINWIRE_MPI_PROGRESS"] = "0"  # nothing is said, and no thread is asked for anything
    check_everything(silent := comm.MPICommunicator(timeout=60.0), int(seed))
    assert silent._progress is None
    del os.environ["THINWIRE_MPI_PROGRESS"]
    rounds()
    overlap()
    stall()


def lose(how: str, chunk: str, victim: str) -> None:
    """Rank ``victim`` leaves the job in the middle of it, killed, stopped, raising, or at another call, while all
    others are in an all-to-all of chunks of so many elements."""
    world = comm.init(timeout=FAILURE_TIMEOUT)
    world.barrier()
    if world.rank == int(victim):
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "raising":
            raise KeyError("a bug of the user")
        world.all_gather(torch.empty(5 * world.size), torch.ones(5))
    numel = int(chunk) * world.size
    world.all_to_all(torch.empty(numel), torch.ones(numel))


def join(backend: str) -> None:
    """Join the job twice, and say what came out."""
    first = comm.init(backend=backend or None)  # type: ignore[arg-type]
    second = comm.init(quiet=True)
    first.barrier()
    second.barrier()
    sys.stdout.write(f"{first.backend} {second.backend} {first.size}\n")


def overlap() -> None:
    """Large transfers of two ranks, which go no rounds, end while their process makes no call of MPI at all."""
    world = comm.MPICommunicator(timeout=60.0).split(comm.init(quiet=True).rank // 2)
    assert isinstance(world, comm.MPICommunicator)
    group = world.duplicate()
    assert isinstance(group, comm.MPICommunicator)
    sent = torch.arange(world.size * (1 << 20)).view(world.size, -1) + world.rank  # 8 MiB a peer: a rendezvous
    received, total = torch.zeros_like(sent), torch.full((1 << 20,), 1.0, dtype=torch.bfloat16)
    works = [
        world.all_to_all(received, sent, async_op=True),
        group.all_reduce(total, async_op=True),  # 16 bits are summed in Python, then on the thread
    ]
    deadline = time.monotonic() + 60.0
    while (world._in_flight or group._in_flight) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not world._in_flight
    assert not group._in_flight
    column = (torch.arange(1 << 20) + world.rank * (1 << 20)).expand(world.size, -1)
    assert torch.equal(received, column + torch.arange(world.size)[:, None])
    assert bool((total == world.size).all())
    for work in works:
        assert work.is_completed()
        work.wait()
    world.barrier()


def stall() -> None:
    """Others never join a transfer that rank 0 has left to the thread: they are named, and MPI is left alone."""
    world = comm.MPICommunicator(timeout=FAILURE_TIMEOUT)
    if world.rank == 0:
        work = world.all_to_all(torch.zeros(3 << 20), torch.zeros(3 << 20), async_op=True)
        with pytest.raises(comm.CommunicationTimeout) as failure:
            work.wait()
        assert world._progress is not None
        assert not world._progress.watched._transfers
        assert failure.value.ranks == (1, 2)
        sys.stdout.write(f"{failure.value}\n")
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()


def rounds() -> None:
    """Large messages go to one partner after another, also while a rank waits for something else; errors come out."""
    from mpi4py import MPI

    world = comm.init(timeout=60.0)
    assert isinstance(world, comm.MPICommunicator)
    assert world._rounds is not None
    group = world.duplicate()
    world._rounds._comm = recorder = _Recording(world._rounds._comm)
    sent_to = recorder.sent_to
    outputs, inputs = _large_exchanges(world)
    works = [world.all_to_all(*pair, async_op=True) for pair in zip(outputs, inputs, strict=True)]
    # Rank 0 waits for others who come to this only once rank 0 has moved its rounds on.
    if world.rank == 0:
        group.barrier()
    for work in reversed(works):
        work.wait()
    if world.rank != 0:
        group.barrier()
    _check_exchanges(world, outputs)
    next_one, last = (world.rank + 1) % 3, (world.rank + 2) % 3
    pieces = [-(-1_000_003 // 64512), -(-70_000 // 64512)]
    assert sent_to == [rank for count in pieces for rank in [next_one] * count + [last] * count]

    gathered, sent_to[:] = torch.empty(3 * 200_000, dtype=torch.uint8), []
    world.all_gather(gathered, torch.full((200_000,), world.rank, dtype=torch.uint8))
    assert torch.equal(gathered.view(3, -1), torch.arange(3, dtype=torch.uint8)[:, None].expand(3, 200_000))
    assert sent_to == [next_one] * 4 + [last] * 4
    world.all_gather(gathered[:30], torch.zeros(10, dtype=torch.uint8))
    assert len(sent_to) == 8, "small messages are MPI's own business"

    # Closed before anybody has waited, yet all arrives.
    hurried = world.duplicate()
    outputs, inputs = _large_exchanges(hurried)
    for pair in zip(outputs, inputs, strict=True):
        hurried.all_to_all(*pair, async_op=True)
    hurried.close()
    _check_exchanges(world, outputs)

    # One rank without a thread: all leave the rounds to MPI.
    alike = comm.MPICommunicator(timeout=60.0, progress=world.rank == 1)
    assert alike._rounds is None
    outputs, inputs = _large_exchanges(alike)
    for pair in zip(outputs, inputs, strict=True):
        alike.all_to_all(*pair)
    _check_exchanges(world, outputs)

    failing = world.duplicate()
    assert isinstance(failing, comm.MPICommunicator)
    assert failing._rounds is not None
    failing._rounds._comm = _Recording(failing._rounds._comm, MPI.Exception(MPI.ERR_OTHER))
    (output, _), (source, _) = _large_exchanges(failing)
    refused(comm.CommunicationError, "all_to_all of 3000009 uint8", failing.all_to_all, output, source)
    world.barrier()


def _large_exchanges(world: comm.Communicator) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and inputs of two all-to-alls: rank r sends the number 10 r + s to rank s."""
    row = (10 * world.rank + torch.arange(3)).to(torch.uint8)[:, None]
    inputs = [row.expand(3, length).contiguous().flatten() for length in (1_000_003, 70_000)]
    return [torch.zeros_like(one) for one in inputs], inputs


def _check_exchanges(world: comm.Communicator, outputs: list[torch.Tensor]) -> None:
    column = (10 * torch.arange(3) + world.rank).to(torch.uint8)[:, None]
    for output in outputs:
        assert torch.equal(output.view(3, -1), column.expand(3, output.numel() // 3))


def turns() -> None:
    """Over Gloo large messages go to one partner after another, small ones are Gloo's business; errors come out."""
    world = comm.init(backend="gloo", timeout=60.0)
    assert isinstance(world, comm.TorchCommunicator)
    small, large = torch.ones(10), torch.full((20_000,), float(world.rank))
    world.all_gather(torch.empty(30), small)
    world.all_to_all(torch.empty(30), torch.ones(30))
    assert world._wiring.pairwise is None

    next_one, last = (world.rank + 1) % 3, (world.rank + 2) % 3
    for name, given, partners in (
        ("all_to_all", large.repeat(3), [next_one, last]),
        ("all_gather", large, [next_one, next_one]),
    ):
        other = world.duplicate()
        assert isinstance(other, comm.TorchCommunicator)
        other._pairwise._group = recorder = _Recording(other._group)  # type: ignore[assignment]
        received = torch.empty(60_000)
        getattr(other, name)(received, given)
        assert torch.equal(received.view(3, -1)[:, 0], torch.arange(3.0))
        assert recorder.sent_to == partners
        recorder.error = RuntimeError("a cable that is out")
        with pytest.raises(comm.CommunicationError, match=rf"{name} of \d+ float32.*a cable that is out"):
            getattr(other, name)(received, given)
    world.barrier()


class _Recording:
    """An MPI communicator or a process group that notes to whom messages go, or raises instead."""

    def __init__(self, inner: Any, error: Exception | None = None) -> None:
        self._inner, self.error = inner, error
        self.sent_to: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, message: Any, to: int, tag: int, way: str = "send") -> Any:
        if self.error is not None:
            raise self.error
        self.sent_to.append(to)
        return getattr(self._inner, way)(message, to, tag)

    def Isend(self, message: Any, to: int, tag: int) -> Any:  # noqa: N802 - MPI's name
        return self.send(message, to, tag, "Isend")


def progress_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "thinwire-mpi-progress"]


def end_threads() -> None:
    """The thread is there from the first asynchronous transfer to the last communicator, or the process's end."""
    from thinwire.comm.mpi_progress import Watched

    drive = Watched.drive

    def drive_and_say(watched: Watched) -> None:
        drive(watched)
        sys.stdout.write("ended\n")  # not where a process ends without having waited for it

    Watched.drive = drive_and_say  # type: ignore[method-assign]
    world = comm.init("mpi", quiet=True)
    assert world.size > 1, "of one rank nothing moves"
    assert not progress_threads()
    world.all_reduce(torch.ones(3), async_op=True).wait()
    (first,) = progress_threads()
    del world
    first.join(60.0)
    assert not first.is_alive()
    second = comm.init("mpi", quiet=True)
    second.all_reduce(torch.ones(3), async_op=True).wait()
    sys.stdout.write(f"{len(progress_threads())} at the end\n")
    sys.stdout.flush()


def one_thread(level: str) -> None:
    """With an MPI that allows calls from one thread only, transfers move in wait, and a warning says so."""
    import mpi4py

    mpi4py.rc.thread_level = level
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        world = comm.init("mpi", quiet=True)
    check_everything(world, 3)
    assert not progress_threads()
    (warning,) = [str(one.message) for one in said if issubclass(one.category, RuntimeWarning)]
    with pytest.raises(RuntimeError) as refusal:
        comm.MPICommunicator(progress=True)
    sys.stdout.write(f"{warning}\n{refusal.value}\n")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
