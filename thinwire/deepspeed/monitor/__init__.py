"""deepspeed.monitor: where scalars are written."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, ("comet", "constants", "csv_monitor", "monitor", "tensorboard", "wandb"))
