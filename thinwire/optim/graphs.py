"""Graphs of a device: launches that are captured once, and replayed without the host's work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from thinwire.comm import Communicator
from thinwire.comm.logged import LoggedCommunicator

__all__ = ["CudaGraphs", "Graph", "Graphs"]


class Graph(Protocol):
    """What was launched while it was captured; its memory is its own as long as it lives."""

    def capturing(self) -> AbstractContextManager[None]:
        """Capture what is launched inside, in place of running it."""

    def replay(self) -> None:
        """Launch it all, with the values that are in the same memory now."""


class Graphs(Protocol):
    """How a device captures."""

    def check(self, comm: Communicator) -> None:
        """Raise ValueError for a communicator whose collectives cannot be captured."""

    def new(self) -> Graph:
        """One that may follow any other of these."""

    def aside(self) -> AbstractContextManager[None]:
        """Launch what is inside where captures take place, before and after all that is outside."""


class CudaGraphs:
    """CUDA graphs of one device, which share their memory: of what one leaves behind, only what somebody holds is safe
    from the next."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @staticmethod
    def check(comm: Communicator) -> None:
        """See Graphs."""
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

    def new(self) -> _CudaGraph:
        """See Graphs."""
        return _CudaGraph(self._stream, self._pool)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See Graphs. autograd remembers on which stream a parameter was first used, and no other can be captured."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


class _CudaGraph:
    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._stream = stream
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """See Graph. Other threads, NCCL's watchdog among them, may go on with what a capture forbids."""
        captured = torch.cuda.graph(
            self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with captured:
            yield

    def replay(self) -> None:
        """See Graph."""
        self._graph.replay()
