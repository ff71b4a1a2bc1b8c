"""How bytes move: one ``Communicator`` over Gloo, NCCL, MPI or in-process threads, found by ``init``.

Nothing above this floor knows which of them carries it, nor which launcher started the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thinwire.comm import threads
from thinwire.comm.communicator import Communicator
from thinwire.comm.detect import Launch, detect
from thinwire.comm.errors import CommunicationError, CommunicationTimeout
from thinwire.comm.launch import init
from thinwire.comm.torch_backend import TorchCommunicator
from thinwire.comm.traffic import Traffic
from thinwire.comm.work import Work

if TYPE_CHECKING:
    from thinwire.comm.mpi_backend import MPICommunicator

__all__ = [
    "CommunicationError",
    "CommunicationTimeout",
    "Communicator",
    "Launch",
    "MPICommunicator",
    "TorchCommunicator",
    "Traffic",
    "Work",
    "detect",
    "init",
    "threads",
]


def __getattr__(name: str) -> Any:
    # Importing mpi4py starts MPI, which must not happen to those who never ask for it.
    if name == "MPICommunicator":
        from thinwire.comm.mpi_backend import MPICommunicator

        return MPICommunicator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
