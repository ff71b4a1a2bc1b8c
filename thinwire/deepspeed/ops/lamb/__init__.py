"""deepspeed.ops.lamb."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import not_offered

__all__ = ["FusedLamb"]

FusedLamb = not_offered(
    "ops.lamb.FusedLamb", 'name it in the configuration instead, "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}'
)
