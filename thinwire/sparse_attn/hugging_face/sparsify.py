"""Block-sparse attention for Hugging Face models, in place: `sparsify` puts it in, `densify` takes it out again.

Models on transformers' attention interface get a registered function; BERT and RoBERTa of transformers 4.x, which
have none, get their attention modules swapped, as do BERT's layers where no whole model is at hand. Longer position
tables repeat the learned ones, as Longformer does (Beltagy et al., 2020, arXiv:2004.05150, section 5)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from thinwire.sparse_attn.attention import check_layout
from thinwire.sparse_attn.hugging_face.interface import InterfacePlug, kept_layout
from thinwire.sparse_attn.hugging_face.swap import SwappedSelfAttention, SwapPlug
from thinwire.sparse_attn.layouts.base import Layout
from thinwire.sparse_attn.modules import BertSparseSelfAttention

_Tokenizer = TypeVar("_Tokenizer")


def extend_position_embedding(model: _Model, max_positions: int) -> _Model:
    """Let a Hugging Face model with BERT's embeddings read `max_positions` tokens; changes `model`, returns it.

    The first rows stay; row i of the new ones is a copy of row i modulo the old length, in the table's dtype, on its
    device. RoBERTa's first `padding_idx + 1` rows, which no token uses, stay as they are and are added to the length.
    The buffers `position_ids` and `token_type_ids` and `config.max_position_embeddings` follow. Make the optimizer
    afterwards: the table is a new parameter. Nothing happens when the model reads that many already.

    Raises TypeError for a model without such a table (rotary and relative positions need none), ValueError for fewer
    positions than it has.
    """
    tables: list[Any] = [
        one for one in model.modules() if isinstance(getattr(one, "position_embeddings", None), nn.Embedding)
    ]
    if not tables or not hasattr(getattr(model, "config", None), "max_position_embeddings"):
        raise TypeError(
            f"{type(model).__name__} has no learned `position_embeddings` table with config.max_position_embeddings, "
            f"as BERT and RoBERTa have; leave max_positions out where positions are rotary or relative"
        )
    old = min(_positions(embeddings.position_embeddings) for embeddings in tables)
    if max_positions < old:
        raise ValueError(f"max_positions is {max_positions}, but the model reads {old} tokens; a table only grows")
    for embeddings in tables:
        if max_positions != _positions(embeddings.position_embeddings):
            _extend(embeddings, max_positions)
    model.config.max_position_embeddings = tables[0].position_embeddings.num_embeddings  # type: ignore[union-attr]
    return model


def update_tokenizer_model_max_length(tokenizer: _Tokenizer, max_positions: int) -> _Tokenizer:
    """Let a Hugging Face tokenizer truncate at `max_positions` tokens, also once saved; returns it."""
    if not hasattr(tokenizer, "model_max_length") or not hasattr(tokenizer, "init_kwargs"):
        raise TypeError(f"expected a Hugging Face tokenizer, got {type(tokenizer).__name__}")
    tokenizer.model_max_length = max_positions
    tokenizer.init_kwargs["model_max_length"] = max_positions
    return tokenizer


def _unused_rows(table: nn.Embedding) -> int:
    """RoBERTa numbers tokens from `padding_idx + 1`."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


def _positions(table: nn.Embedding) -> int:
    return table.num_embeddings - _unused_rows(table)


def _extend(embeddings: Any, max_positions: int) -> None:
    table: nn.Embedding = embeddings.position_embeddings
    unused, device = _unused_rows(table), table.weight.device
    source = unused + torch.arange(max_positions, device=device) % _positions(table)
    with torch.no_grad():
        weight = torch.cat([table.weight[:unused], table.weight[source]])
    table.weight = nn.Parameter(weight, requires_grad=table.weight.requires_grad)
    table.num_embeddings = rows = len(weight)
    for name, buffer in (
        ("position_ids", torch.arange(rows, device=device)[None]),
        ("token_type_ids", torch.zeros(1, rows, dtype=torch.int64, device=device)),
    ):
        if isinstance(getattr(embeddings, name, None), Tensor):
            setattr(embeddings, name, buffer)


_Model = TypeVar("_Model", bound=nn.Module)
_STATE = "_thinwire_sparse_attention"


def sparsify(model: _Model, layout: Layout | None = None, max_positions: int | None = None) -> _Model:
    """Make every self-attention of a Hugging Face model attend over the blocks of `layout`; returns `model`, changed.

    Without `layout`, over those that its configuration holds, where a sparse model was saved.

    `max_positions` lengthens a learned position table first (`extend_position_embedding`); make the optimizer after
    that. Padding masks, dropout, gradient checkpointing and grouped key/value heads work as before; a decoder stays
    causal to the token, and saves time with a unidirectional layout. A second call replaces the layout, those of parts
    that were sparsified before included. Weights and `state_dict` stay as they were. Inputs with fewer blocks than the
    layout puts into a row are attended densely.

    `save_pretrained` writes the layout with the configuration, and `from_pretrained` gives a sparse model again; a
    process that has not called `sparsify` calls `register_with_transformers` first, and is refused otherwise. A
    `Custom` layout, and models of transformers 4, are sparsified again after loading.

    The model gets its own copy of its configuration, so that a model that shared it is not changed: give
    `max_positions` to the model that will be saved, not to a part of it.

    Raises TypeError for a model that cannot be served, saying why: an encoder-decoder, cross-attention, a model made of
    several (sparsify its parts), or one without the attention interface; ValueError for a layout of another number of
    heads, no layout given or kept, `config.output_attentions` (probabilities are never stored) or fewer positions than
    the model has. The model computes as before then. Later, a call with `output_attentions=True` or a filled key/value
    cache is a ValueError.
    """
    _check_model(model)
    layout = kept_layout(model.config) if layout is None else layout
    if layout is None:
        raise ValueError(f"this {type(model).__name__} was not saved as a sparse model: give sparsify a layout")
    check_layout(layout, model.config.num_attention_heads)  # type: ignore[union-attr, arg-type]
    state: _State | None = vars(model).get(_STATE)
    plug = _choose_plug(model) if state is None else state.plug
    if state is None:
        # Models built from one configuration object share it: the choice of attention in it would reach them all.
        shared: Any = model.config
        own = copy.deepcopy(shared)
        for module in model.modules():
            if getattr(module, "config", None) is shared:
                module.config = own
    if max_positions is not None:
        extend_position_embedding(model, max_positions)
    for part in list(model.modules()):
        if part is not model:
            _restore(part)
    if state is None:
        plug.attach(model)
        refusal = model.register_forward_pre_hook(_refuse_attentions, with_kwargs=True)
        setattr(model, _STATE, _State(plug, refusal))
    plug.set_layout(model, layout)
    return model


def densify(model: _Model) -> _Model:
    """Give a sparsified model, and its sparsified parts, their own attention back; returns `model`, changed.

    A dense model is left alone. A lengthened position table stays, with what was learned in it.
    """
    if _STATE not in vars(model) and InterfacePlug.attends(model):  # `from_pretrained` made it sparse
        sparsify(model)
    for part in list(model.modules()):
        _restore(part)
    return model


def replace_model_self_attention_with_sparse_self_attention(
    model: _Model, max_position: int, sparsity_config: Layout
) -> _Model:
    """`sparsify` under the name, and with the order of arguments, that its earliest users know."""
    return sparsify(model, sparsity_config, max_position)


def _restore(part: nn.Module) -> None:
    state: _State | None = vars(part).get(_STATE)
    if state is not None:
        state.plug.detach(part)
        state.refusal.remove()
        delattr(part, _STATE)


@dataclass
class _State:
    """What `densify` needs to undo `sparsify`; held by the model itself."""

    plug: InterfacePlug | SwapPlug
    refusal: RemovableHandle


def _choose_plug(model: nn.Module) -> InterfacePlug | SwapPlug:
    for plug in (InterfacePlug, SwapPlug):
        if plug.serves(model):
            return plug()
    raise TypeError(
        f"{type(model).__name__} cannot be sparsified: expected a model of transformers 5 or newer on its attention "
        f"interface, or an absolute-position BERT or RoBERTa encoder of transformers 4; build its attention on "
        f"SparseSelfAttention or block_sparse_attention instead"
    )


def _check_model(model: nn.Module) -> None:
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if config is None:
        raise TypeError(f"expected a Hugging Face model, got {name}, which has no config")
    parts = [part for part in getattr(config, "sub_configs", None) or () if getattr(config, part, None) is not None]
    if parts:
        raise TypeError(
            f"{name} is made of several models ({', '.join(parts)}), which need layouts of their own; "
            f"call sparsify on the part that reads the long sequence"
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise TypeError(f"{name} has cross-attention, which block layouts of one sequence do not describe")
    if not hasattr(config, "num_attention_heads"):
        raise TypeError(f"{name} has no config.num_attention_heads to hold against the layout's heads")
    if getattr(config, "output_attentions", False):
        raise ValueError(f"config.output_attentions is set. {_NO_ATTENTIONS}")


_NO_ATTENTIONS = (
    "Block-sparse attention never forms the attention probabilities, so it cannot return them; "
    "leave output_attentions out, or call densify(model) and set attn_implementation to 'eager' to look at them"
)


def _refuse_attentions(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise ValueError(f"output_attentions=True was given. {_NO_ATTENTIONS}")


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
    attentions: list[Any] = [getattr(layer, "attention", None) for layer in layers]
    for layer, attention in zip(layers, attentions, strict=True):
        own = getattr(attention, "self", None)
        if not all(isinstance(getattr(own, name, None), nn.Module) for name in ("query", "key", "value")):
            raise TypeError(
                f"{type(layer).__name__} has no self-attention with query, key and value at attention.self, as BERT's "
                "layers have; build its attention on SparseSelfAttention instead"
            )
    for attention in attentions:
        own = attention.self
        if InterfacePlug.serves_layer(own):
            InterfacePlug.set_layout_of_layer(own, layout)
        elif SwapPlug.serves_layer(own):
            swapped = own if isinstance(own, SwappedSelfAttention) else SwappedSelfAttention(own)
            swapped.layout = layout
            attention.self = swapped
        else:
            sparse = BertSparseSelfAttention(config, layout)
            sparse.query, sparse.key, sparse.value = own.query, own.key, own.value
            attention.self = sparse.train(own.training)
    return layers
