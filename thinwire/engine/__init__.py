"""Floor 4, what a trainer holds: configuration, the engine, its schedules, data, logs and checkpoints."""

from __future__ import annotations
