"""deepspeed.ops.sparse_attention.sparse_attention_utils."""

from __future__ import annotations

from thinwire.sparse_attn import SparseAttentionUtils

__all__ = ["SparseAttentionUtils"]
