"""A configuration, loaded and checked as a whole: nothing in it is accepted and ignored."""

from __future__ import annotations

from thinwire.engine.config.errors import ConfigError
from thinwire.engine.config.loading import load_config
from thinwire.engine.config.models import EngineConfig

__all__ = ["ConfigError", "EngineConfig", "load_config"]
