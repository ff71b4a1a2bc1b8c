"""Products and softmaxes of packed blocks on dense matrices in plain torch: the specification of their kernels.

Differentiable by autograd, and in any floating dtype; run in float64 it is what the kernels are held against.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.sparse_attn import Custom, pack_blocks, unpack_blocks


def reference_block_sparse_matmul(
    a: Tensor, b: Tensor, layout: Custom, mode: str, *, trans_a: bool = False, trans_b: bool = False
) -> Tensor:
    """The same as `block_sparse_matmul`, argument for argument, with zeros where the layout has no block."""

    def dense(packed: Tensor, heads: int) -> Tensor:
        rows, columns = (size * layout.block for size in layout.block_mask.shape[1:])
        return unpack_blocks(packed, layout, heads, rows, columns)

    left = dense(a, b.size(1)) if mode == "dsd" else a
    right = dense(b, a.size(1)) if mode == "dds" else b
    product = (left.mT if trans_a else left) @ (right.mT if trans_b else right)
    return pack_blocks(product, layout) if mode == "sdd" else product


def reference_block_sparse_softmax(
    x: Tensor, layout: Custom, heads: int, length: int, *, scale: float = 1.0, bias: Tensor | None = None
) -> Tensor:
    """`block_sparse_softmax` on dense scores [B, heads, length, length], with all its masks joined in an additive
    `bias` that such scores can be added to."""
    inside = unpack_blocks(torch.ones_like(x), layout, heads, length, length) > 0
    scores = unpack_blocks(x, layout, heads, length, length) * scale
    if bias is not None:
        inside = inside & (bias != -torch.inf)
        scores = scores + torch.where(bias == -torch.inf, 0.0, bias)
    scores = torch.where(inside, scores, -torch.inf)
    # A row of -inf alone has no softmax: it takes one of zeros, which the second mask takes away with its gradient.
    attends = (scores != -torch.inf).any(-1, keepdim=True)
    dense = torch.where(inside, torch.softmax(torch.where(attends, scores, 0.0), -1), 0.0) * attends
    return pack_blocks(dense, layout)
