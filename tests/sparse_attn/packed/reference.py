"""What products and softmaxes of packed blocks mean, block by block in plain torch: the specification of their kernels.

Slow, differentiable by autograd, and in any floating dtype; run in float64 it is what the kernels are held against.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.sparse_attn.layouts.named import Layout
from thinwire.sparse_attn.packed import Blocks, unpack_blocks

__all__ = ["reference_block_sparse_matmul", "reference_block_sparse_softmax"]


def reference_block_sparse_matmul(
    a: Tensor, b: Tensor, layout: Layout, mode: str, *, trans_a: bool = False, trans_b: bool = False
) -> Tensor:
    """The same as `block_sparse_matmul`, argument for argument, one block after the other."""
    if mode == "sdd":
        left, right = a.mT if trans_a else a, b.mT if trans_b else b
        blocks = Blocks.of(layout, a.size(1), left.size(2), right.size(3), a.device)
        size = layout.block
        products = [
            left[:, head, row * size : (row + 1) * size] @ right[:, head, :, column * size : (column + 1) * size]
            for head, row, column in _places(blocks)
        ]
        return torch.stack(products, 1) if products else a.new_empty(a.size(0), *blocks.shape)
    if mode == "dsd":
        return _expanded(a, b.mT if trans_b else b, layout, transposed=trans_a)
    return _expanded(b, a if trans_a else a.mT, layout, transposed=not trans_b).mT


def reference_block_sparse_softmax(
    x: Tensor, layout: Layout, heads: int, length: int, *, scale: float = 1.0, bias: Tensor | None = None
) -> Tensor:
    """`block_sparse_softmax` on dense scores [B, heads, length, length], with all its masks joined in an additive
    `bias` that such scores can be added to."""
    blocks = Blocks.of(layout, heads, length, length, x.device)
    inside = unpack_blocks(torch.ones_like(x), layout, heads, length, length) > 0
    scores = unpack_blocks(x, layout, heads, length, length) * scale
    if bias is not None:
        inside = inside & (bias != -torch.inf)
        scores = scores + torch.where(bias == -torch.inf, 0.0, bias)
    scores = torch.where(inside, scores, -torch.inf)
    # A row of -inf alone has no softmax: it takes one of zeros, which the second mask takes away with its gradient.
    attends = (scores != -torch.inf).any(-1, keepdim=True)
    dense = torch.where(inside, torch.softmax(torch.where(attends, scores, 0.0), -1), 0.0) * attends
    size = layout.block
    parts = [
        dense[:, head, row * size : (row + 1) * size, column * size : (column + 1) * size]
        for head, row, column in _places(blocks)
    ]
    return torch.stack(parts, 1) if parts else torch.zeros_like(x)


def _expanded(packed: Tensor, b: Tensor, layout: Layout, *, transposed: bool) -> Tensor:
    rows, columns = (b.size(2), None) if transposed else (None, b.size(2))
    blocks = Blocks.of(layout, b.size(1), rows, columns, b.device)
    size = layout.block
    lines = blocks.index.num_columns if transposed else blocks.index.num_rows
    out = [[b.new_zeros(b.size(0), size, b.size(3)) for _ in range(lines)] for _ in range(b.size(1))]
    for entry, (head, row, column) in enumerate(_places(blocks)):
        line, other = (column, row) if transposed else (row, column)
        one = packed[:, entry].mT if transposed else packed[:, entry]
        out[head][line] = out[head][line] + one @ b[:, head, other * size : (other + 1) * size]
    if not lines:
        return b.new_zeros(b.size(0), b.size(1), 0, b.size(3))
    return torch.stack([torch.cat(head, 1) for head in out], 1)


def _places(blocks: Blocks) -> list[tuple[int, int, int]]:
    """Head, row and column of every packed block."""
    mask = blocks.index.dense().expand(blocks.heads, -1, -1)
    return [(int(head), int(row), int(column)) for head, row, column in mask.nonzero()]
