"""deepspeed.ops.sparse_attention.matmul."""

from __future__ import annotations

from thinwire.sparse_attn import MatMul

__all__ = ["MatMul"]
