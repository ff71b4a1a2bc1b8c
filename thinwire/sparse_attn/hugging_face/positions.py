"""Longer position tables for models that learned positions, BERT's and RoBERTa's, and the tokenizer to go with them.

The longer table repeats the learned one, as Longformer does (Beltagy et al., 2020, arXiv:2004.05150, section 5).
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["extend_position_embedding", "update_tokenizer_model_max_length"]

_Model = TypeVar("_Model", bound=nn.Module)
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
    tables = _position_tables(model)
    old = min(_positions(embeddings.position_embeddings) for embeddings in tables)
    if max_positions < old:
        raise ValueError(f"max_positions is {max_positions}, but the model reads {old} tokens; a table only grows")
    for embeddings in tables:
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


def _position_tables(model: nn.Module) -> list[Any]:
    """The modules that hold a `position_embeddings` table, as BERT's `embeddings` does."""
    tables = [m for m in model.modules() if isinstance(getattr(m, "position_embeddings", None), nn.Embedding)]
    if not tables or not hasattr(getattr(model, "config", None), "max_position_embeddings"):
        raise TypeError(
            f"{type(model).__name__} has no learned `position_embeddings` table with config.max_position_embeddings, "
            f"as BERT and RoBERTa have; leave max_positions out where positions are rotary or relative"
        )
    return tables


def _unused_rows(table: nn.Embedding) -> int:
    """RoBERTa numbers tokens from `padding_idx + 1`."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


def _positions(table: nn.Embedding) -> int:
    return table.num_embeddings - _unused_rows(table)


def _extend(embeddings: Any, max_positions: int) -> None:
    table: nn.Embedding = embeddings.position_embeddings
    if max_positions == _positions(table):
        return
    unused = _unused_rows(table)
    device = table.weight.device
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
