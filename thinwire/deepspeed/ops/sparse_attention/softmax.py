"""deepspeed.ops.sparse_attention.softmax."""

from __future__ import annotations

from thinwire.sparse_attn import Softmax

__all__ = ["Softmax"]
