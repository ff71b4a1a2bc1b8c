"""What one launched rank does: ``job.py TASK ...``. Every task starts like a user's script, with ``init``."""

from __future__ import annotations

import os
import signal
import sys
import warnings

import torch

from tests.comm.collectives_body import check_everything
from thinwire import comm

FAILURE_TIMEOUT = 2.0


def body(seed: str, backend: str = "") -> None:
    """All checks on the communicator that ``init`` finds, or on one over ``backend``."""
    warnings.simplefilter("error")
    world = comm.init(backend=backend or None, timeout=60.0)  # type: ignore[arg-type]
    check_everything(world, int(seed))
    # Whole lines at once: the ranks share one output.
    sys.stdout.write(f"rank {world.rank} of {world.size} passed over {world.backend}\n")


def mpi_body(seed: str) -> None:
    """``body``, then again on communicators of the user, with counts to be cut, beside other messages."""
    body(seed)
    from mpi4py import MPI

    from thinwire.comm import mpi_backend

    world = MPI.COMM_WORLD
    message = bytearray(3)
    received = world.Irecv(message, MPI.ANY_SOURCE, MPI.ANY_TAG)
    mpi_backend._LARGEST_COUNT = 5
    for parent in (world, world.Split(world.rank % 2)):
        check_everything(comm.MPICommunicator(parent, timeout=60.0), int(seed))
    world.Send(b"abc", (world.rank + 1) % world.size)
    received.Wait()
    assert message == b"abc"
    sys.stdout.write(f"rank {world.rank} of {world.size} passed over its own\n")


def lose(how: str, victim: str) -> None:
    """Rank ``victim`` leaves the job in the middle of it: killed, stopped, raising, or at another call."""
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
    world.all_to_all(torch.empty(3 * world.size), torch.ones(3 * world.size))


def join(backend: str) -> None:
    """Join the job twice, and say what came out."""
    first = comm.init(backend=backend or None)  # type: ignore[arg-type]
    second = comm.init(quiet=True)
    first.barrier()
    second.barrier()
    sys.stdout.write(f"{first.backend} {second.backend} {first.size}\n")


if __name__ == "__main__":
    {"body": body, "mpi_body": mpi_body, "lose": lose, "join": join}[sys.argv[1]](*sys.argv[2:])
