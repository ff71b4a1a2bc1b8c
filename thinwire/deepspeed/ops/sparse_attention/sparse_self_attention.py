"""deepspeed.ops.sparse_attention.sparse_self_attention."""

from __future__ import annotations

from thinwire.sparse_attn import SparseSelfAttention

__all__ = ["SparseSelfAttention"]
