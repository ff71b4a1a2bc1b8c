"""deepspeed.runtime.pipe.topology, which thinwire has no counterpart of."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import not_offered

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"]

_INSTEAD = "it has no pipeline parallelism; shard the model with zero_optimization stage 3"

ProcessTopology = not_offered("runtime.pipe.topology.ProcessTopology", _INSTEAD)
PipeDataParallelTopology = not_offered("runtime.pipe.topology.PipeDataParallelTopology", _INSTEAD)
PipeModelDataParallelTopology = not_offered("runtime.pipe.topology.PipeModelDataParallelTopology", _INSTEAD)
