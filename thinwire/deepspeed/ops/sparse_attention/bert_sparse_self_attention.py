"""deepspeed.ops.sparse_attention.bert_sparse_self_attention."""

from __future__ import annotations

from thinwire.sparse_attn import BertSparseSelfAttention

__all__ = ["BertSparseSelfAttention"]
