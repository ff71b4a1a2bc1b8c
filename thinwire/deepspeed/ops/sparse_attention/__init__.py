"""deepspeed.ops.sparse_attention."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import lazy_names
from thinwire.deepspeed.ops.sparse_attention.sparse_self_attention import SparseSelfAttention
from thinwire.deepspeed.ops.sparse_attention.sparsity_config import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

__all__ = [
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
]

__getattr__, __dir__ = lazy_names(__name__, ())
