"""Attention layers, SparseSelfAttention and its BERT form, over any layout of this package.

They keep their two mask modes: 'add' (floats added to the scores) and 'mul' (zero means "do not attend").
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from thinwire.sparse_attn.attention import block_sparse_attention
from thinwire.sparse_attn.layouts.base import Layout
from thinwire.sparse_attn.layouts.made import MadeLayout, SparsityConfig, layout_of

MaskMode = Literal["add", "mul"]


class SparseSelfAttention(nn.Module):
    """softmax(q k^T / sqrt(D) + masks) v over the blocks of a layout; no parameters of its own.

    - `sparsity_config`: the layout, for as many heads as the tensors have, or for 1; or a `SparsityConfig`.
    - `key_padding_mask_mode`, `attn_mask_mode`: what numbers in that mask mean. 'add': floats added to the scores.
      'mul': 0 is "do not attend", anything else "attend". A boolean mask is True = attend in either mode.
    - `max_seq_length`: longer inputs are refused.
    - `dropout`: the share of probabilities dropped in training.

    A `master_layout` in a saved state is taken: attention is over its blocks from then on, whatever
    random ones this layout would have drawn.

    Raises ValueError for an unknown mode, and at a call for an input too long or that `block_sparse_attention` refuses.
    """

    def __init__(
        self,
        sparsity_config: Layout | SparsityConfig,
        key_padding_mask_mode: MaskMode = "add",
        attn_mask_mode: MaskMode = "mul",
        max_seq_length: int = 2048,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            _check_mode(name, mode)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}, expected 0 <= dropout < 1")
        self.sparsity_config = sparsity_config
        self._layout = layout_of(sparsity_config)
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self.max_seq_length = max_seq_length
        self.dropout = dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend: query [B, H, Sq, D], key and value [B, H, Sk, D] to [B, H, Sq, D]. A key [B, H, D, Sk] is turned.

        `rpe` [Sq, Sk], [H, Sq, Sk] or [B, H, Sq, Sk] is added to the scores; `key_padding_mask` is [B, Sk] or
        [B, 1, 1, Sk]; `attn_mask` is [Sq, Sk] or 4-D with each size whole or 1.
        """
        if key.shape != value.shape and key.mT.shape == value.shape:
            key = key.mT
        longest = max(query.shape[2], key.shape[2])
        if longest > self.max_seq_length:
            raise ValueError(f"the sequence has {longest} tokens, max_seq_length is {self.max_seq_length}; raise it")
        if key_padding_mask is not None and key_padding_mask.dim() == 4 and key_padding_mask.shape[1:3] == (1, 1):
            key_padding_mask = key_padding_mask[:, 0, 0]
        return block_sparse_attention(
            query,
            key,
            value,
            self._layout,
            key_padding_mask=mask_by_mode("key_padding_mask", key_padding_mask, self.key_padding_mask_mode),
            attn_mask=mask_by_mode("attn_mask", attn_mask, self.attn_mask_mode),
            rpe=rpe,
            dropout_p=self.dropout if self.training else 0.0,
        )

    def extra_repr(self) -> str:
        """Show the settings in `print(model)`."""
        layout = self._layout
        return (
            f"{type(layout).__name__}(num_heads={layout.num_heads}, block={layout.block}), "
            f"key_padding_mask_mode={self.key_padding_mask_mode!r}, attn_mask_mode={self.attn_mask_mode!r}, "
            f"max_seq_length={self.max_seq_length}, dropout={self.dropout}"
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(f"{prefix}master_layout")
        if saved is not None:
            # Out of the copy that torch made for this call: a strict load knows no such key.
            del state_dict[f"{prefix}master_layout"]
            block = self._layout.block
            make = partial(_saved_blocks, saved.cpu(), block)
            self._layout = MadeLayout(saved.size(0), block, make, causal=self._layout.causal)
        super()._load_from_state_dict(state_dict, prefix, *args)


class BertSparseSelfAttention(nn.Module):
    """BERT's self-attention with its three projections, over the blocks of `sparsity_config`.

    `config`: whatever has `hidden_size` and `num_attention_heads`. Raises ValueError where heads do not divide it.
    """

    def __init__(self, config: Any, sparsity_config: Layout | SparsityConfig) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        if width % heads:
            raise ValueError(f"hidden_size is {width}, expected a multiple of the {heads} attention heads")
        self.num_attention_heads: int = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.sparse_self_attention = SparseSelfAttention(sparsity_config)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[B, S, E] to [B, S, E]; `attention_mask` [B, S] or [B, 1, 1, S] is added to the scores of keys."""
        q, k, v = (
            projection(hidden_states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        out: Tensor = self.sparse_self_attention(q, k, v, key_padding_mask=attention_mask)
        return out.transpose(1, 2).flatten(2)


def _saved_blocks(master: Tensor, block: int, length: int) -> Tensor:
    """A `master_layout` that was saved, [heads, blocks, blocks] of the longest sequence, cut to a shorter one."""
    blocks = length // block
    if blocks > master.size(1):
        raise ValueError(
            f"the saved layout is for {master.size(1) * block} tokens, got {length}; load a state without "
            "master_layout for longer sequences"
        )
    return master[:, :blocks, :blocks]


def mask_by_mode(name: str, mask: Tensor | None, mode: MaskMode) -> Tensor | None:
    """`mask` as `block_sparse_attention` takes it. Raises ValueError for an unknown mode."""
    _check_mode(f"{name}_mode", mode)
    return mask != 0 if mask is not None and mode == "mul" else mask


def _check_mode(name: str, mode: str) -> None:
    if mode not in ("add", "mul"):
        raise ValueError(f"{name} is {mode!r}, expected 'add' or 'mul'")
