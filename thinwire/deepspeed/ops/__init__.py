"""deepspeed.ops: optimizers, and block-sparse attention."""

from __future__ import annotations

from thinwire.deepspeed.git_version_info import compatible_ops as __compatible_ops__
from thinwire.deepspeed.lazy_names import lazy_names

__all__ = ["__compatible_ops__"]

__getattr__, __dir__ = lazy_names(
    __name__, ("adagrad", "adam", "aio", "lamb", "lion", "op_builder", "sparse_attention", "transformer")
)
