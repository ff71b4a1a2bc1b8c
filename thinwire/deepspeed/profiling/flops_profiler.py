"""deepspeed.profiling.flops_profiler."""

from __future__ import annotations

from thinwire.engine import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
