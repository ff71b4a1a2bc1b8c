"""deepspeed.checkpoint: names in DeepSpeed's own checkpoint files. `thinwire checkpoint import` reads those."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__, ("constants", "ds_to_universal", "utils"), {"checkpoint.constants": ("UNIVERSAL_CHECKPOINT_INFO",)}
)
