"""deepspeed.runtime.engine."""

from __future__ import annotations

from thinwire.engine import Engine as DeepSpeedEngine

__all__ = ["ADAM_OPTIMIZER", "LAMB_OPTIMIZER", "DeepSpeedEngine"]

ADAM_OPTIMIZER = "adam"
LAMB_OPTIMIZER = "lamb"
