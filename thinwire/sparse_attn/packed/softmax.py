"""The softmax along rows of a matrix of which only a layout's blocks exist, packed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinwire.sparse_attn.layouts.named import Layout
from thinwire.sparse_attn.masks import attention_bias, key_bias
from thinwire.sparse_attn.operator import packed_kernels
from thinwire.sparse_attn.packed.blocks import Blocks, gather

__all__ = ["block_sparse_softmax"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def block_sparse_softmax(
    x: Tensor,
    layout: Layout,
    *,
    scale: float = 1.0,
    rpe: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    heads: int | None = None,
    length: int | None = None,
    in_place: bool = False,
) -> Tensor:
    """softmax(scale x + rpe + masks) along rows, over the blocks of `layout` alone: packed like x.

    `x` is [B, blocks of all heads, block, block], float16, bfloat16 (sums are float32), float32 or float64, as
    `block_sparse_matmul` makes it. A row that attends nothing, for it has no block or all is masked, is 0. A NaN that
    is masked reaches nothing. Gradients: x, rpe and a float attn_mask; there is no second derivative.

    - `rpe` [Sq, Sk], [H|1, Sq, Sk] or 4-D: floats added to the scores.
    - `key_padding_mask` [B, Sk], `attn_mask` [Sq, Sk] or 4-D with each size whole or 1: boolean, True = attend, or
      floats added to the scores.
    - `heads`: of x, where the layout is for one and serves all; the layout's unless given.
    - `length`: of queries and keys, which a Custom layout knows by itself, and a mask says.
    - `in_place`: write over x; the result has x's memory, and x keeps the gradient of what it held.

    Raises ValueError for shapes that do not fit or an unknown length, TypeError for dtypes or no layout.
    """
    if x.dim() != 4 or x.dtype not in _DTYPES:
        raise TypeError(f"expected floating packed blocks [batch, blocks, block, block], got {x.dtype} {list(x.shape)}")
    blocks = _blocks(x, layout, heads, length, _length_of(rpe, key_padding_mask, attn_mask))
    blocks.check_packed("x", x)
    index, dtype = blocks.index, torch.float64 if x.dtype == torch.float64 else torch.float32
    queries, keys = index.num_rows * index.block, index.num_columns * index.block
    sizes: dict[str, Any] = {"batch": x.size(0), "key_length": keys, "dtype": dtype}
    of_keys = key_bias(key_padding_mask, attn_mask, **sizes)
    bias = attention_bias(attn_mask, rpe, heads=blocks.heads, query_length=queries, **sizes)
    shared = blocks.heads // index.num_heads
    packed_bias = None if bias is None else _packed_bias(bias, blocks, x.size(0))
    if of_keys is not None and shared > 1:
        of_keys = of_keys.repeat_interleave(shared, 0)
    out: Tensor = _Softmax.apply(x, scale, packed_bias, of_keys, blocks, in_place)  # type: ignore[no-untyped-call]
    return out


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: float,
        bias: Tensor | None,
        of_keys: Tensor | None,
        blocks: Blocks,
        in_place: bool,
    ) -> Tensor:
        folded = blocks.fold(x)
        out = folded if in_place else torch.empty_like(folded)
        packed_kernels(x).softmax(folded, scale, bias, of_keys, blocks.index, out)
        result = blocks.unfold(out)
        if in_place:
            # Another tensor with x's memory and version, and not x: so x.grad stays the gradient of what x held.
            result = x.detach() if result.data_ptr() == x.data_ptr() else x.detach().copy_(result)
        ctx.save_for_backward(result)
        ctx.blocks, ctx.scale = blocks, scale
        ctx.bias_shape = None if bias is None else bias.shape
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        d_scores = packed_kernels(out).softmax_backward(blocks.fold(d_out), blocks.fold(out), blocks.index)
        d_bias = d_scores.sum_to_size(ctx.bias_shape) if ctx.needs_input_grad[2] else None
        return blocks.unfold(d_scores * ctx.scale).to(out.dtype), None, d_bias, None, None, None


def _length_of(rpe: Tensor | None, key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> int | None:
    """What the masks say of the number of keys."""
    lengths = [one.size(-1) for one in (rpe, key_padding_mask, attn_mask) if one is not None and one.size(-1) > 1]
    return lengths[0] if lengths else None


def _blocks(x: Tensor, layout: Layout, heads: int | None, length: int | None, of_masks: int | None) -> Blocks:
    if not isinstance(layout, Layout):
        raise TypeError(f"expected a layout, got {type(layout).__name__}; make one of a mask of blocks with Custom")
    known = of_masks if length is None else length
    if known is None and not hasattr(layout, "block_mask"):
        raise ValueError(
            f"packed blocks do not say how long the sequence is that a {type(layout).__name__} layout is for: give "
            "length="
        )
    size = None if hasattr(layout, "block_mask") else known
    return Blocks.of(layout, layout.num_heads if heads is None else heads, size, size, x.device)


def _packed_bias(bias: Tensor, blocks: Blocks, batch: int) -> Tensor:
    """bias [B|1, H|1, Sq, Sk] as packed blocks of the index's heads: [B|1, nnz, block, block] after folding."""
    if blocks.index.num_heads > 1:
        return gather(bias.expand(-1, blocks.heads, -1, -1), blocks.index)
    if math.prod(bias.shape[:2]) > 1:
        bias = blocks.fold(bias.expand(batch, blocks.heads, -1, -1))
    return gather(bias, blocks.index)
