"""Hugging Face encoders without padding: documents joined into one row, and only labelled tokens through the output
head."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from thinwire.transformers.documents import Documents, by_document
from thinwire.transformers.dropout import SeededDropout

_Model = TypeVar("_Model", bound=nn.Module)

_PLUG = "_thinwire_fast_encoder"
_IGNORED = -100
_OF_DECODERS = ("past_key_values", "encoder_hidden_states", "use_cache")


@dataclass(frozen=True)
class _Encoder:
    """How a class of encoders takes its inputs.

    Attributes:
        positions: the parameters of its forward, in their order.
        token_inputs: those that have a value a token, [B, S, ...].
        masks: what its forward takes for no mask at all.
    """

    positions: tuple[str, ...]
    token_inputs: tuple[str, ...]
    masks: Mapping[str, None] | None = None


_BERT = _Encoder(
    ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds"),
    ("input_ids", "token_type_ids", "position_ids", "inputs_embeds"),
)
_MODERN_BERT = _Encoder(
    ("input_ids", "attention_mask", "position_ids", "inputs_embeds"),
    ("input_ids", "position_ids", "inputs_embeds"),
    {"full_attention": None, "sliding_attention": None},
)
_ENCODERS = {
    "BertModel": _BERT,
    "RobertaModel": _BERT,
    "XLMRobertaModel": _BERT,
    "RobertaPreLayerNormModel": _BERT,
    "ModernBertModel": _MODERN_BERT,
}


@dataclass(frozen=True)
class _Head:
    """Where a masked language model has its parts, by their names from it: `hidden`, before the matrix, is a module
    or several, one after another."""

    hidden: tuple[str, ...]
    matrix: str
    divides_by_items: bool = False  # a loss that knows how many labels all micro-batches of a step have


_ROBERTA = _Head(("lm_head.dense", "gelu", "lm_head.layer_norm"), "lm_head.decoder")
_HEADS = {
    "BertForMaskedLM": _Head(("cls.predictions.transform",), "cls.predictions.decoder"),
    "RobertaForMaskedLM": _ROBERTA,
    "XLMRobertaForMaskedLM": _ROBERTA,
    "RobertaPreLayerNormForMaskedLM": _ROBERTA,
    "ModernBertForMaskedLM": _Head(("head",), "decoder", divides_by_items=True),
}


def accelerate(model: _Model) -> _Model:
    """Have a Hugging Face encoder compute no padding; changes `model` and returns it.

    For BERT, RoBERTa, XLM-RoBERTa, RoBERTa-PreLayerNorm and ModernBERT, bare or with any head. A batch with padding,
    told by its `attention_mask` [B, S], goes through the layers as one row of all its tokens, each document attending
    to itself; outputs have the shapes that they had, with zeros for padding. Where a masked language model trains
    with labels, its head sees labelled tokens alone, and the loss comes without logits. Results are otherwise those
    of the plain model up to rounding; weights, `state_dict` and `save_pretrained` are untouched. Calls that need no
    such thing, or other masks, take the plain path. Positions count padding, if it is on the left, as they did.
    Dropout in fp32 on CPUs, but for that of attention, draws other masks from torch's seed, and stores none.

    Sparse attention (`sparsify`) goes in before, and attends within documents then. `undo` gives the plain model back.

    Raises TypeError for a model that has none of these encoders, ValueError for a decoder.
    """
    if _PLUG in vars(model):
        return model
    encoders: list[Any] = [one for one in model.modules() if type(one).__name__ in _ENCODERS]
    if not encoders:
        known = ", ".join(name.removesuffix("Model") for name in _ENCODERS)
        raise TypeError(f"{type(model).__name__} has no encoder that is known here, of {known}: train it as it is")
    for encoder in encoders:
        if getattr(encoder.config, "is_decoder", False):
            raise ValueError(f"{type(encoder).__name__} has is_decoder=True; only encoders can do without padding")
    plug = _Plug([(one, one.config._attn_implementation) for one in encoders])
    for encoder, implementation in plug.attended:
        encoder.set_attn_implementation(by_document("sdpa" if implementation == "eager" else implementation))
        plug.handles.append(encoder.register_forward_pre_hook(_join, with_kwargs=True))
        plug.handles.append(encoder.register_forward_hook(_pad, with_kwargs=True))
    for head in (one for one in model.modules() if type(one).__name__ in _HEADS):
        plug.heads.append(head)
        head.forward = _MaskedLanguageModel(head)
    _exchange_class(model, nn.Dropout, SeededDropout)
    setattr(model, _PLUG, plug)
    return model


def undo(model: _Model) -> _Model:
    """Give `model` its plain forward back, if `accelerate` was called with it; returns it."""
    plug: _Plug | None = vars(model).pop(_PLUG, None)
    if plug is not None:
        for encoder, implementation in plug.attended:
            encoder.set_attn_implementation(implementation)
        for handle in plug.handles:
            handle.remove()
        for head in plug.heads:
            del head.forward
        _exchange_class(model, SeededDropout, nn.Dropout)
    return model


def _exchange_class(model: nn.Module, before: type[nn.Module], after: type[nn.Module]) -> None:
    for layer in model.modules():
        if type(layer) is before:
            layer.__class__ = after


@dataclass(frozen=True)
class _Plug:
    """What `accelerate` has put into a model: encoders with what they attended with, hooks, and heads."""

    attended: list[tuple[Any, str]]
    handles: list[RemovableHandle] = field(default_factory=list)
    heads: list[nn.Module] = field(default_factory=list)


def _join(encoder: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a batch with padding as one row."""
    kind = _ENCODERS[type(encoder).__name__]
    inputs = {**dict(zip(kind.positions, given, strict=False)), **named}
    mask = inputs.get("attention_mask")
    other = any(inputs.get(name) is not None for name in _OF_DECODERS) or inputs.get("output_attentions")
    if other or not isinstance(mask, Tensor) or mask.dim() != 2:
        return given, named
    tokens = inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.shape[:2] != mask.shape:
        return given, named  # refused by the encoder itself
    documents = Documents.of(mask)
    if documents.tokens in (0, mask.numel()):
        return given, named
    if inputs.get("position_ids") is None:
        inputs["position_ids"] = _positions(encoder, inputs.get("input_ids"), tokens)
    for name in kind.token_inputs:
        if inputs.get(name) is not None:
            inputs[name] = documents.join(inputs[name].expand(*mask.shape, *inputs[name].shape[2:]))
    return (), {**inputs, "attention_mask": kind.masks, "documents": documents}


def _pad(encoder: Any, given: tuple[Any, ...], named: dict[str, Any], outputs: Any) -> Any:
    """The outputs for one row with the shapes of the batch."""
    documents: Documents | None = named.get("documents")
    if documents is None:
        return outputs
    if isinstance(outputs, tuple):
        padded = [_padded(documents, one) for one in outputs]
        if getattr(encoder, "pooler", None) is not None:
            padded[1] = encoder.pooler(padded[0])
        return tuple(padded)
    for name, value in outputs.items():
        outputs[name] = _padded(documents, value)
    if getattr(encoder, "pooler", None) is not None:
        # It reads the first token of each document; of the row it had read the very first alone.
        outputs["pooler_output"] = encoder.pooler(outputs["last_hidden_state"])
    return outputs


def _padded(documents: Documents, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_padded(documents, one) for one in value)
    if isinstance(value, Tensor) and value.dim() == 3 and value.shape[:2] == (1, documents.tokens):
        return documents.pad(value)
    return value


def _positions(encoder: Any, input_ids: Tensor | None, tokens: Tensor) -> Tensor:
    """What the encoder would number the tokens of the batch, [1 or B, S]."""
    embeddings = encoder.embeddings
    if not hasattr(embeddings, "create_position_ids_from_input_ids"):
        return torch.arange(tokens.shape[1], device=tokens.device)[None]
    if input_ids is None:
        positions: Tensor = embeddings.create_position_ids_from_inputs_embeds(tokens, embeddings.padding_idx)
    else:
        positions = embeddings.create_position_ids_from_input_ids(input_ids, embeddings.padding_idx)
    return positions


class _MaskedLanguageModel:
    """The forward of a masked language model whose head sees labelled tokens alone where it trains.

    An object, so that a model with it can be copied and pickled; trainers read what it takes off its signature.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._head = model, _HEADS[type(model).__name__]
        self._plain: Callable[..., Any] = model.forward
        self.__signature__ = inspect.signature(model.forward)

    def __call__(self, *given: Any, **named: Any) -> Any:
        from transformers.modeling_outputs import MaskedLMOutput

        inputs = self.__signature__.bind(*given, **named).arguments
        inputs |= inputs.pop("kwargs", {})
        labels = inputs.get("labels")
        return_dict = inputs.get("return_dict", getattr(self._model.config, "return_dict", True))
        if labels is None or not self._model.training or return_dict is False:
            return self._plain(*given, **named)
        items = inputs.pop("num_items_in_batch", None) if self._head.divides_by_items else None
        outputs = self._model.base_model(**{name: value for name, value in inputs.items() if name != "labels"})
        labelled = labels != _IGNORED
        loss = self._loss(outputs.last_hidden_state[labelled], labels[labelled], items)
        return MaskedLMOutput(loss=loss, hidden_states=outputs.hidden_states, attentions=outputs.attentions)

    def _loss(self, hidden: Tensor, labels: Tensor, items: Any) -> Tensor:
        """The cross-entropy of [N, E] and [N], its mean, or its sum over `items`."""
        for name in self._head.hidden:
            hidden = functional.gelu(hidden) if name == "gelu" else self._model.get_submodule(name)(hidden)
        matrix = self._model.get_submodule(self._head.matrix)
        reduction = "mean" if items is None else "sum"
        loss = _linear_cross_entropy(hidden, matrix.weight, matrix.bias, labels, reduction)
        return loss if items is None else loss / items


def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, reduction: str
) -> Tensor:
    """In chunks where torch has that and it pays, so that logits are never all there; those of 16 bits become fp32."""
    options = getattr(nn, "LinearCrossEntropyOptions", None)
    exact = hidden.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled(hidden.device.type)
    if options is None or not exact or len(hidden) < hidden.shape[1]:
        logits = functional.linear(hidden, weight, bias)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return functional.cross_entropy(logits.to(dtype), labels, reduction=reduction)
    whole: Tensor = functional.linear_cross_entropy(
        hidden, weight, labels, linear_bias=bias, reduction=reduction, options=options()
    )
    return whole
