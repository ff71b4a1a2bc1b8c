"""deepspeed.ops.sparse_attention.sparsity_config: the layouts."""

from __future__ import annotations

from thinwire.sparse_attn import BigBird as BigBirdSparsityConfig
from thinwire.sparse_attn import BSLongformer as BSLongformerSparsityConfig
from thinwire.sparse_attn import Dense as DenseSparsityConfig
from thinwire.sparse_attn import Fixed as FixedSparsityConfig
from thinwire.sparse_attn import Layout as SparsityConfig
from thinwire.sparse_attn import LocalSlidingWindow as LocalSlidingWindowSparsityConfig
from thinwire.sparse_attn import Variable as VariableSparsityConfig

__all__ = [
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparsityConfig",
    "VariableSparsityConfig",
]
