"""Move bytes: one ``Communicator`` over Gloo, NCCL, MPI or in-process threads, found by ``init``.

Nothing above this floor knows which of them carries it, nor which launcher started the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.lazy_imports import lazy_exports

__all__ = [
    "CommunicationError",
    "CommunicationTimeout",
    "Communicator",
    "Elastic",
    "Launch",
    "LoggedCommunicator",
    "MPICommunicator",
    "MembershipError",
    "OperationLog",
    "OperationStatistics",
    "TorchCommunicator",
    "Traffic",
    "Work",
    "detect",
    "init",
    "threads",
]

# Above all, importing mpi4py starts MPI, which must not happen to those who never ask for it.
if TYPE_CHECKING:
    from thinwire.comm import threads
    from thinwire.comm.collectives import Traffic, Work
    from thinwire.comm.communicator import Communicator
    from thinwire.comm.elastic import Elastic, MembershipError
    from thinwire.comm.errors import CommunicationError, CommunicationTimeout
    from thinwire.comm.launch import init
    from thinwire.comm.launchers import Launch, detect
    from thinwire.comm.mpi_backend import MPICommunicator
    from thinwire.comm.operation_log import LoggedCommunicator, OperationLog, OperationStatistics
    from thinwire.comm.torch_backend import TorchCommunicator
else:
    __getattr__, __dir__ = lazy_exports(__name__)
