"""deepspeed.runtime.comm.mpi."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import not_offered

__all__ = ["MpiBackend"]

MpiBackend = not_offered(
    "runtime.comm.mpi.MpiBackend",
    "thinwire.compress.CompressedExchange is its compressed all-reduce, over any communicator of thinwire.comm",
)
