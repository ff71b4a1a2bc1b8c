"""Floor 6, what a trainer holds: configuration, the engine, its schedules, data, logs and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.lazy_imports import lazy_exports

__all__ = [
    "CallError",
    "CheckpointError",
    "CheckpointStore",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "FlopsProfiler",
    "LRRangeTest",
    "ModelDescription",
    "Monitor",
    "NonFiniteError",
    "OneCycle",
    "RepeatingLoader",
    "ResumableLoader",
    "Snapshot",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_schedule",
    "export_weights",
    "get_model_profile",
    "load_config",
]

# `thinwire checkpoint --help` needs none of this room's heavy imports, and a schedule alone not the others.
if TYPE_CHECKING:
    from thinwire.engine.checkpoint.exporting import export_weights
    from thinwire.engine.checkpoint.manifest import ModelDescription
    from thinwire.engine.checkpoint.store import CheckpointStore, Snapshot
    from thinwire.engine.config import ConfigError, EngineConfig, load_config
    from thinwire.engine.data import RepeatingLoader, ResumableLoader
    from thinwire.engine.engine import Engine
    from thinwire.engine.errors import CheckpointError
    from thinwire.engine.flops_profiler import FlopsProfiler, get_model_profile
    from thinwire.engine.loss_scale import NonFiniteError
    from thinwire.engine.monitor import Monitor
    from thinwire.engine.optimizers import CallError
    from thinwire.engine.schedules import (
        LRRangeTest,
        OneCycle,
        WarmupCosineLR,
        WarmupDecayLR,
        WarmupLR,
        build_schedule,
    )
else:
    __getattr__, __dir__ = lazy_exports(__name__)
