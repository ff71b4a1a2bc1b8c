"""deepspeed.ops.aio: thinwire does not swap to NVMe, and needs no asynchronous files for it."""

from __future__ import annotations

from thinwire.deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
