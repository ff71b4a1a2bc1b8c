"""Block-sparse attention for Hugging Face models, in place: `sparsify` puts it in, `densify` takes it out again.

Models on transformers' attention interface get a registered function; BERT and RoBERTa of transformers 4.x, which
have none, get their attention modules swapped.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from thinwire.sparse_attn.attention import check_layout
from thinwire.sparse_attn.hugging_face.interface import InterfacePlug
from thinwire.sparse_attn.hugging_face.positions import extend_position_embedding
from thinwire.sparse_attn.hugging_face.saved_layout import kept_layout
from thinwire.sparse_attn.hugging_face.swap import SwapPlug
from thinwire.sparse_attn.layouts.named import Layout

__all__ = ["densify", "replace_model_self_attention_with_sparse_self_attention", "sparsify"]

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
        _give_own_config(model)
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
    """`sparsify` under the name, and with the order of arguments, that DeepSpeed's users know."""
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


def _give_own_config(model: nn.Module) -> None:
    """Models built from one configuration object share it: the choice of attention in it would reach them all."""
    shared = model.config
    own = copy.deepcopy(shared)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own


_NO_ATTENTIONS = (
    "Block-sparse attention never forms the attention probabilities, so it cannot return them; "
    "leave output_attentions out, or call densify(model) and set attn_implementation to 'eager' to look at them"
)


def _refuse_attentions(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise ValueError(f"output_attentions=True was given. {_NO_ATTENTIONS}")
