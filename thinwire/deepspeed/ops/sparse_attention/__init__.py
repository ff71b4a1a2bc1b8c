"""deepspeed.ops.sparse_attention."""

from __future__ import annotations

from thinwire.deepspeed.ops.sparse_attention.matmul import MatMul
from thinwire.deepspeed.ops.sparse_attention.softmax import Softmax
from thinwire.sparse_attn import (
    BertSparseSelfAttention,
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparseAttentionUtils,
    SparseSelfAttention,
    SparsityConfig,
    VariableSparsityConfig,
)

__all__ = [
    "BSLongformerSparsityConfig",
    "BertSparseSelfAttention",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "MatMul",
    "Softmax",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
]
