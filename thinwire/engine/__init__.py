"""Floor 4, what a trainer holds: configuration, the engine, its schedules, data, logs and checkpoints."""

from __future__ import annotations

from thinwire.engine.checkpoint import CheckpointError, CheckpointStore, ModelDescription, Snapshot, export_weights
from thinwire.engine.config import ConfigError, EngineConfig, load_config
from thinwire.engine.data.loader import ResumableLoader
from thinwire.engine.engine import Engine
from thinwire.engine.errors import NonFiniteError
from thinwire.engine.initialize import initialize
from thinwire.engine.monitoring.monitor import Monitor
from thinwire.engine.schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_schedule,
)

__all__ = [
    "CheckpointError",
    "CheckpointStore",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "LRRangeTest",
    "ModelDescription",
    "Monitor",
    "NonFiniteError",
    "OneCycle",
    "ResumableLoader",
    "Snapshot",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_schedule",
    "export_weights",
    "initialize",
    "load_config",
]
