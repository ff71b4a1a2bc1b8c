"""The attention layer whose names DeepSpeed's users know, over any layout of this package.

It keeps their two mask modes: 'add' (floats added to the scores) and 'mul' (zero means "do not attend").
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from thinwire.sparse_attn.attention import block_sparse_attention
from thinwire.sparse_attn.layouts.named import Layout

__all__ = ["SparseSelfAttention"]

MaskMode = Literal["add", "mul"]


class SparseSelfAttention(nn.Module):
    """softmax(q k^T / sqrt(D) + masks) v over the blocks of a layout; no parameters of its own.

    - `sparsity_config`: the layout, for as many heads as the tensors have, or for 1.
    - `key_padding_mask_mode`, `attn_mask_mode`: what numbers in that mask mean. 'add': floats added to the scores.
      'mul': 0 is "do not attend", anything else "attend". A boolean mask is True = attend in either mode.
    - `max_seq_length`: longer inputs are refused.
    - `dropout`: the share of probabilities dropped in training.

    Raises ValueError for an unknown mode, and at a call for an input too long or that `block_sparse_attention` refuses.
    """

    def __init__(
        self,
        sparsity_config: Layout,
        key_padding_mask_mode: MaskMode = "add",
        attn_mask_mode: MaskMode = "mul",
        max_seq_length: int = 2048,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in ("add", "mul"):
                raise ValueError(f"{name} is {mode!r}, expected 'add' or 'mul'")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}, expected 0 <= dropout < 1")
        self.sparsity_config = sparsity_config
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
        """Attend: query [B, H, Sq, D], key and value [B, H, Sk, D] to [B, H, Sq, D].

        `rpe` [Sq, Sk], [H, Sq, Sk] or [B, H, Sq, Sk] is added to the scores; `key_padding_mask` is [B, Sk] or
        [B, 1, 1, Sk]; `attn_mask` is [Sq, Sk] or 4-D with each size whole or 1.
        """
        longest = max(query.shape[2], key.shape[2])
        if longest > self.max_seq_length:
            raise ValueError(f"the sequence has {longest} tokens, max_seq_length is {self.max_seq_length}; raise it")
        if key_padding_mask is not None and key_padding_mask.dim() == 4 and key_padding_mask.shape[1:3] == (1, 1):
            key_padding_mask = key_padding_mask[:, 0, 0]
        return block_sparse_attention(
            query,
            key,
            value,
            self.sparsity_config,
            key_padding_mask=_by_mode(key_padding_mask, self.key_padding_mask_mode),
            attn_mask=_by_mode(attn_mask, self.attn_mask_mode),
            rpe=rpe,
            dropout_p=self.dropout if self.training else 0.0,
        )

    def extra_repr(self) -> str:
        """Show the settings in `print(model)`."""
        layout = self.sparsity_config
        return (
            f"{type(layout).__name__}(num_heads={layout.num_heads}, block={layout.block}), "
            f"key_padding_mask_mode={self.key_padding_mask_mode!r}, attn_mask_mode={self.attn_mask_mode!r}, "
            f"max_seq_length={self.max_seq_length}, dropout={self.dropout}"
        )


def _by_mode(mask: Tensor | None, mode: MaskMode) -> Tensor | None:
    return mask != 0 if mask is not None and mode == "mul" else mask
