"""deepspeed.runtime.comm.nccl."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import not_offered

__all__ = ["NcclBackend"]

NcclBackend = not_offered(
    "runtime.comm.nccl.NcclBackend",
    "thinwire.compress.CompressedExchange is its compressed all-reduce, over any communicator of thinwire.comm",
)
