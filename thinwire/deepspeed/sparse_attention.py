"""Sparse attention with the calling forms of DeepSpeed: thin layers over thinwire.sparse_attn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thinwire.sparse_attn.hugging_face.padding import PaddedInputs, pad_to_block_size, unpad_sequence_output
from thinwire.sparse_attn.hugging_face.sparsify import (
    extend_position_embedding,
    replace_model_self_attention_with_sparse_self_attention,
    replace_self_attention_of_layers,
    update_tokenizer_model_max_length,
)
from thinwire.sparse_attn.layouts.base import Layout
from thinwire.sparse_attn.layouts.made import SparsityConfig, layout_of
from thinwire.sparse_attn.layouts.named import Custom, LocalSlidingWindow
from thinwire.sparse_attn.modules import MaskMode, mask_by_mode
from thinwire.sparse_attn.packed import MODES, block_sparse_matmul, block_sparse_softmax

_Model = TypeVar("_Model", bound=nn.Module)


class LocalSlidingWindowSparsityConfig(LocalSlidingWindow):
    """`LocalSlidingWindow` with DeepSpeed's order of arguments, in which no `different_layout_per_head` stands."""

    def __init__(
        self, num_heads: int, block: int = 16, num_sliding_window_blocks: int = 3, attention: Any = "unidirectional"
    ) -> None:
        super().__init__(num_heads, block, num_sliding_window_blocks=num_sliding_window_blocks, attention=attention)


class MatMul:
    """`block_sparse_matmul` over `layout`, a tensor [heads, rows, columns] of 0 and 1, or [rows, columns] for every
    head. Called with `a` and `b`; leading sizes of 1 may be left out.

    `mode`, `trans_a` and `trans_b` are the function's. `bench` is taken, and measures nothing: `torch.profiler` does.
    Raises ValueError for another mode or no such layout.
    """

    def __init__(
        self, layout: Tensor, block: int, mode: str, trans_a: bool = False, trans_b: bool = False, bench: bool = False
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, expected one of {', '.join(MODES)}")
        self.layout = layout
        self.block = block
        self.mode = mode
        self.trans_a = trans_a
        self.trans_b = trans_b
        self._layout = _layout_of_mask(layout, block)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """a b, one of the three packed as `mode` says."""
        dimensions = max(a.dim(), b.dim())
        out = block_sparse_matmul(
            _four_dimensional(a),
            _four_dimensional(b),
            self._layout,
            self.mode,
            trans_a=self.trans_a,
            trans_b=self.trans_b,
        )
        while out.dim() > dimensions and out.size(0) == 1:
            out = out.squeeze(0)
        return out


class Softmax:
    """`block_sparse_softmax` over `layout`, a tensor as `MatMul`'s, written over its input.

    `bench` is taken, and measures nothing: `torch.profiler` does.
    """

    def __init__(self, layout: Tensor, block: int, bench: bool = False) -> None:
        self.layout = layout
        self.block = block
        self._layout = _layout_of_mask(layout, block)

    def __call__(
        self,
        x: Tensor,
        scale: float = 1.0,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask_mode: MaskMode = "add",
        attn_mask_mode: MaskMode = "add",
    ) -> Tensor:
        """Softmax of packed x, in place: the result has the memory of x.

        `key_padding_mask` is [B, Sk], `attn_mask` [Sq, Sk]; in mode "mul" their zeros say "do not attend". `rpe` is
        [Sq, Sk], [H, Sq, Sk] or [B, H, Sq, Sk].
        """
        return block_sparse_softmax(
            x,
            self._layout,
            scale=scale,
            rpe=rpe,
            key_padding_mask=mask_by_mode("key_padding_mask", key_padding_mask, key_padding_mask_mode),
            attn_mask=mask_by_mode("attn_mask", attn_mask, attn_mask_mode),
            in_place=True,
        )


class SparseAttentionUtils:
    """thinwire.sparse_attn's functions for Hugging Face models, as static methods with DeepSpeed's arguments."""

    extend_position_embedding = staticmethod(extend_position_embedding)
    update_tokenizer_model_max_length = staticmethod(update_tokenizer_model_max_length)
    unpad_sequence_output = staticmethod(unpad_sequence_output)

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: _Model, max_position: int, sparsity_config: Layout | SparsityConfig
    ) -> _Model:
        """`thinwire.sparse_attn.sparsify`, which lengthens the position table too unless that has been done."""
        return replace_model_self_attention_with_sparse_self_attention(model, max_position, layout_of(sparsity_config))

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Sequence[nn.Module], sparsity_config: Layout | SparsityConfig
    ) -> Sequence[nn.Module]:
        """`thinwire.sparse_attn.replace_self_attention_of_layers`, of a layout or a configuration."""
        return replace_self_attention_of_layers(config, layers, layout_of(sparsity_config))

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pad_token_id: int,
        model_embeddings: Callable[[Tensor], Tensor] | None,
    ) -> PaddedInputs:
        """`thinwire.sparse_attn.pad_to_block_size`; `input_ids` may be given beside `inputs_embeds`, and are padded
        too."""
        rest = attention_mask, token_type_ids, position_ids
        if input_ids is None or inputs_embeds is None:
            return pad_to_block_size(block_size, input_ids, *rest, inputs_embeds, pad_token_id, model_embeddings)
        padded = pad_to_block_size(block_size, input_ids, *rest, pad_token_id=pad_token_id)
        embeds = pad_to_block_size(block_size, None, None, None, None, inputs_embeds, pad_token_id, model_embeddings)[
            -1
        ]
        return (*padded[:5], embeds)


def _layout_of_mask(layout: Tensor, block: int) -> Custom:
    if not isinstance(layout, Tensor) or layout.dim() not in (2, 3) or not ((layout == 0) | (layout == 1)).all():
        what = list(layout.shape) if isinstance(layout, Tensor) else type(layout).__name__
        raise ValueError(f"expected a layout tensor of 0 and 1, [heads, rows, columns] or [rows, columns], got {what}")
    return Custom(layout.to(torch.bool), block)


def _four_dimensional(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x
