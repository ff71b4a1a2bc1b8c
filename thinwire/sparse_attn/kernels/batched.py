"""Products and softmaxes of packed blocks in plain torch, on any device: rows that hold the same number of blocks are
gathered side by side, so that each such group is one batched matrix product.

Packed blocks are [B, nnz, block, block] in the order of `BlockIndex.places`. Indices and tensors have as many heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.sparse_attn.block_index import BlockIndex

_GATHERED = 1 << 20  # elements gathered at a time, so that they are still in the cache for the product


def sampled(a: Tensor, b: Tensor, index: BlockIndex) -> Tensor:
    """The blocks of a b: a [B, H, M, K], b [B, H, K, N] to [B, nnz, block, block]."""
    batch, _, _, inner = a.shape
    block = index.block
    out = a.new_empty(batch, index.columns.numel(), block, block)
    rows, columns = _lines(a, index.num_rows, block), _lines(b.mT, index.num_columns, block)
    for group in index.equal_rows:
        for piece in group.pieces(_GATHERED // max(1, batch * block * inner)):
            right = columns[:, piece.others].flatten(2, 3).flatten(0, 1)
            product = _product(rows[:, piece.lines].flatten(0, 1), right.mT)
            out[:, piece.entries] = product.view(batch, -1, block, piece.others.size(1), block).transpose(2, 3)
    return out


def expanded(packed: Tensor, b: Tensor, index: BlockIndex, *, transposed: bool) -> Tensor:
    """The packed matrix, or its transpose, times b: b [B, H, K, N] to [B, H, M, N]."""
    batch, heads, _, width = b.shape
    block = index.block
    groups = index.equal_columns if transposed else index.equal_rows
    ours, theirs = (index.num_columns, index.num_rows) if transposed else (index.num_rows, index.num_columns)
    out = b.new_zeros(batch, heads * ours, block, width)
    lines = _lines(b, theirs, block)
    for group in groups:
        for piece in group.pieces(_GATHERED // max(1, batch * block * max(block, width))):
            blocks = packed[:, piece.entries]  # [B, g, n, block, block]
            left = blocks.flatten(2, 3).mT if transposed else blocks.transpose(2, 3).flatten(3, 4)
            right = lines[:, piece.others].flatten(2, 3)
            product = _product(left.flatten(0, 1), right.flatten(0, 1))
            out[:, piece.lines] = product.view(batch, -1, block, width)
    return out.view(batch, heads, ours * block, width)


def softmax(
    packed: Tensor, scale: float, bias: Tensor | None, key_bias: Tensor | None, index: BlockIndex, out: Tensor
) -> None:
    """Softmax along rows of scale * packed + bias + key_bias into `out`, which may be `packed`; sums are float32.

    bias is packed, [B|1, nnz, block, block], and key_bias [B, Sk]; where either is -inf nothing is attended. A row
    that attends nothing is 0.
    """
    batch, _, block, _ = packed.shape
    keys = None if key_bias is None else key_bias.view(batch, index.num_columns, block)
    for group in index.equal_rows:
        for piece in group.pieces(_GATHERED // max(1, batch * block * block)):
            scores = packed[:, piece.entries].to(_sum_dtype(packed)) * scale
            added = [] if bias is None else [bias[:, piece.entries]]
            if keys is not None:
                added.append(keys[:, piece.others % index.num_columns][..., None, :])
            for one in added:
                scores = (scores + one).masked_fill_(one == -torch.inf, -torch.inf)
            rows = scores.transpose(2, 3).flatten(3, 4)  # [B, g, block, n * block]
            nothing = rows.amax(-1, keepdim=True) == -torch.inf
            rows = torch.softmax(rows, -1).masked_fill_(nothing, 0.0)
            out[:, piece.entries] = rows.view(*rows.shape[:3], -1, block).transpose(2, 3).to(out.dtype)


def softmax_backward(d_out: Tensor, out: Tensor, index: BlockIndex) -> Tensor:
    """The gradient of the scores, scaled and biased, of their softmax `out`: packed, in the dtype of sums."""
    batch, _, block, _ = out.shape
    d_scores = torch.empty_like(out, dtype=_sum_dtype(out))
    for group in index.equal_rows:
        for piece in group.pieces(_GATHERED // max(1, batch * block * block)):
            probabilities = out[:, piece.entries].to(d_scores.dtype)
            weighted = probabilities * d_out[:, piece.entries]
            d_scores[:, piece.entries] = weighted - probabilities * weighted.sum((2, 4), keepdim=True)
    return d_scores


def _lines(dense: Tensor, lines: int, block: int) -> Tensor:
    """[B, H, lines * block, W] as [B, H * lines, block, W]."""
    return dense.reshape(dense.size(0), dense.size(1) * lines, block, dense.size(3))


def _sum_dtype(like: Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The batched product, summed in float32 at least; GPUs do so by themselves."""
    if left.is_cuda or left.dtype in (torch.float32, torch.float64):
        return torch.bmm(left, right)
    return torch.bmm(left.float(), right.float()).to(left.dtype)
