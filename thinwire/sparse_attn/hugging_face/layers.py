"""Attention swapped layer by layer, where no whole model is at hand: in BERT's layers, and others built alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from thinwire.sparse_attn.attention import check_layout
from thinwire.sparse_attn.hugging_face.interface import InterfacePlug
from thinwire.sparse_attn.hugging_face.swap import SwappedSelfAttention, SwapPlug
from thinwire.sparse_attn.layouts.named import Layout
from thinwire.sparse_attn.modules import BertSparseSelfAttention

__all__ = ["replace_self_attention_of_layers"]


def replace_self_attention_of_layers(config: Any, layers: Sequence[nn.Module], layout: Layout) -> Sequence[nn.Module]:
    """Make the self-attention of BERT's `layers` attend over the blocks of `layout`; returns `layers`, changed.

    `layers`: each has its self-attention, with `query`, `key` and `value`, at `attention.self`. `config`: the model's,
    with `hidden_size` and `num_attention_heads`. Hugging Face's layers get what `sparsify` gives them; transformers
    keeps the choice in the configuration, so that all layers of that model have to be given. Others, which call
    `self(hidden_states, attention_mask)` and expect a tensor, get a `BertSparseSelfAttention` with their projections.

    Raises TypeError for layers built otherwise, ValueError for a layout of another number of heads; no layer is
    changed then.
    """
    check_layout(layout, config.num_attention_heads)
    attentions = [getattr(layer, "attention", None) for layer in layers]
    for layer, attention in zip(layers, attentions, strict=True):
        own = getattr(attention, "self", None)
        if not all(isinstance(getattr(own, name, None), nn.Module) for name in ("query", "key", "value")):
            raise TypeError(
                f"{type(layer).__name__} has no self-attention with query, key and value at attention.self, as BERT's "
                "layers have; build its attention on SparseSelfAttention instead"
            )
    for attention in attentions:
        _replace(attention, config, layout)
    return layers


def _replace(attention: Any, config: Any, layout: Layout) -> None:
    own = attention.self
    if InterfacePlug.serves_layer(own):
        InterfacePlug.set_layout_of_layer(own, layout)
        return
    if SwapPlug.serves_layer(own):
        swapped = own if isinstance(own, SwappedSelfAttention) else SwappedSelfAttention(own)
        swapped.layout = layout
        attention.self = swapped
        return
    sparse = BertSparseSelfAttention(config, layout)
    sparse.query, sparse.key, sparse.value = own.query, own.key, own.value
    attention.self = sparse.train(own.training)
