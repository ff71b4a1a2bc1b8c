"""Block-sparse attention, apart from the rest of thinwire: layouts, the function over them with its kernels, and the
plugs that put it into modules and Hugging Face models."""

from __future__ import annotations

from thinwire.sparse_attn.attention import block_sparse_attention
from thinwire.sparse_attn.block_index import BlockIndex
from thinwire.sparse_attn.hugging_face.interface import register_with_transformers
from thinwire.sparse_attn.hugging_face.padding import pad_to_block_size, unpad_sequence_output
from thinwire.sparse_attn.hugging_face.sparsify import (
    densify,
    extend_position_embedding,
    replace_model_self_attention_with_sparse_self_attention,
    replace_self_attention_of_layers,
    sparsify,
    update_tokenizer_model_max_length,
)
from thinwire.sparse_attn.layouts.base import Layout
from thinwire.sparse_attn.layouts.made import SparsityConfig, layout_from_config, layout_to_config
from thinwire.sparse_attn.layouts.named import BigBird, BSLongformer, Custom, Dense, Fixed, LocalSlidingWindow, Variable
from thinwire.sparse_attn.modules import BertSparseSelfAttention, SparseSelfAttention
from thinwire.sparse_attn.packed import block_sparse_matmul, block_sparse_softmax, pack_blocks, unpack_blocks
from thinwire.sparse_attn.reference import reference_attention

__all__ = [
    "BSLongformer",
    "BertSparseSelfAttention",
    "BigBird",
    "BlockIndex",
    "Custom",
    "Dense",
    "Fixed",
    "Layout",
    "LocalSlidingWindow",
    "SparseSelfAttention",
    "SparsityConfig",
    "Variable",
    "block_sparse_attention",
    "block_sparse_matmul",
    "block_sparse_softmax",
    "densify",
    "extend_position_embedding",
    "layout_from_config",
    "layout_to_config",
    "pack_blocks",
    "pad_to_block_size",
    "reference_attention",
    "register_with_transformers",
    "replace_model_self_attention_with_sparse_self_attention",
    "replace_self_attention_of_layers",
    "sparsify",
    "unpack_blocks",
    "unpad_sequence_output",
    "update_tokenizer_model_max_length",
]
