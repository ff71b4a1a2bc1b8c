"""Inputs of a Hugging Face model padded to whole blocks, and its output cut back; and the layout for shorter ones.

The kernels take any length; this serves fixed shapes, as compiled graphs and older code like them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from thinwire.sparse_attn.layouts.base import Layout
from thinwire.sparse_attn.layouts.named import Dense

PaddedInputs = tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def pad_to_block_size(
    block_size: int,
    input_ids: Tensor | None,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    pad_token_id: int = 0,
    model_embeddings: Callable[[Tensor], Tensor] | None = None,
) -> PaddedInputs:
    """Pad on the right to a multiple of `block_size`; what is added is never attended.

    Returns (pad length, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds), None where None came
    in, save that an absent `attention_mask` is made when there is something to mask.

    - `input_ids` [B, S] gets `pad_token_id`, or `inputs_embeds` [B, S, E] gets `model_embeddings(pad_token_id)`, zeros
      without `model_embeddings`. Give one of the two.
    - `attention_mask`: [B, S] of ones and zeros or booleans; or [..., S] and [..., S, S], boolean, ones and zeros, or
      additive. A float mask without a positive value is additive, and gets the lowest value of its dtype.
    - `token_type_ids` [B, S] gets 0.
    - `position_ids` [B|1, S] gets `pad_token_id`: RoBERTa's own position of padding, and a row that BERT has.
      Positions that the model works out by itself need a table of the padded length.

    Raises ValueError for both or neither of `input_ids` and `inputs_embeds`, or lengths that differ.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds, as the model itself expects")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, expected 1 or more")
    ids_or_embeds = input_ids if input_ids is not None else inputs_embeds
    assert ids_or_embeds is not None
    batch, length = ids_or_embeds.shape[:2]
    for name, given in (
        ("attention_mask", attention_mask),
        ("token_type_ids", token_type_ids),
        ("position_ids", position_ids),
    ):
        if given is not None and given.shape[-1] != length:
            raise ValueError(f"{name} has shape {list(given.shape)}, expected a last size of {length}, as the input")

    pad_length = -length % block_size
    if pad_length == 0:
        return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
    if attention_mask is None:
        attention_mask = torch.ones(batch, length, dtype=torch.int64, device=ids_or_embeds.device)
    if inputs_embeds is not None:
        added = inputs_embeds.new_zeros(batch, pad_length, inputs_embeds.shape[2])
        if model_embeddings is not None:
            ids = torch.full((batch, pad_length), pad_token_id, dtype=torch.int64, device=inputs_embeds.device)
            added = model_embeddings(ids).to(inputs_embeds.dtype)
        inputs_embeds = torch.cat([inputs_embeds, added], dim=1)
    return (
        pad_length,
        _padded(input_ids, pad_length, pad_token_id),
        _padded_mask(attention_mask, length, pad_length),
        _padded(token_type_ids, pad_length, 0),
        _padded(position_ids, pad_length, pad_token_id),
        inputs_embeds,
    )


def unpad_sequence_output(pad_length: int, sequence_output: Tensor) -> Tensor:
    """The output [B, S + pad_length, E] without what `pad_to_block_size` added: [B, S, E], a view."""
    return sequence_output[:, : sequence_output.shape[1] - pad_length]


def _padded(ids: Tensor | None, pad_length: int, value: int) -> Tensor | None:
    return None if ids is None else functional.pad(ids, (0, pad_length), value=value)


def _padded_mask(mask: Tensor, length: int, pad_length: int) -> Tensor:
    additive = mask.is_floating_point() and not bool((mask > 0).any())
    masked = torch.finfo(mask.dtype).min if additive else 0
    padded = functional.pad(mask, (0, pad_length), value=masked)
    # A size of 1 in the place of the queries broadcasts, and stays.
    if mask.dim() == 2 or mask.shape[-2] != length or length == 1:
        return padded
    # Added queries attend what the last one does: a row that attends nothing is NaN in a dense softmax.
    return torch.cat([padded, padded[..., -1:, :].expand(*padded.shape[:-2], pad_length, -1)], dim=-2)


def layout_for(layout: Layout, length: int) -> Layout:
    """`layout`, or every block where `length` tokens are too few for its pattern: its window would hold them all.

    Models meet short inputs in every last batch and at every first token, and must take them as they did before.
    """
    if layout.fits(length):
        return layout
    return Dense(1, layout.block, attention="unidirectional" if layout.causal else "bidirectional")
