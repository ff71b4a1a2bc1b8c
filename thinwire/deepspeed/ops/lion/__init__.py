"""deepspeed.ops.lion."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import not_offered

__all__ = ["DeepSpeedCPULion", "FusedLion"]

_INSTEAD = (
    'name it in the configuration, {"type": "OneBitLion"}, which sends one bit an element; or pass a Lion of another '
    "package, a torch.optim.Optimizer"
)

FusedLion = not_offered("ops.lion.FusedLion", _INSTEAD)
DeepSpeedCPULion = not_offered("ops.lion.DeepSpeedCPULion", _INSTEAD)
