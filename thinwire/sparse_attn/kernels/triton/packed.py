"""Products and softmaxes of packed blocks on GPUs: launches their Triton kernels.

Packed blocks are [B, nnz, block, block] in the order of `BlockIndex.places`. Indices and tensors have as many heads.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from thinwire.sparse_attn.block_index import BlockIndex
from thinwire.sparse_attn.kernels.triton.device import where_its_tensor_is
from thinwire.sparse_attn.kernels.triton.packed_products import Matrix, expanded_kernel, sampled_kernel
from thinwire.sparse_attn.kernels.triton.packed_softmax import Scores, softmax_backward_kernel, softmax_kernel

__all__ = ["expanded", "sampled", "softmax", "softmax_backward"]

_INNER = 32  # columns of a at a time
_WIDEST = 64  # rows and columns of the result that a program makes


@where_its_tensor_is
def sampled(a: Tensor, b: Tensor, index: BlockIndex) -> Tensor:
    """The blocks of a b: a [B, H, M, K], b [B, H, K, N] to [B, nnz, block, block]."""
    batch, _, _, inner = a.shape
    heads, rows, columns = index.places
    out = a.new_empty(batch, len(columns), index.block, index.block)
    if out.numel():
        places = torch.stack([heads, rows, columns], 1).int()
        tile = min(_WIDEST, index.block)
        grid = (len(columns), batch, (index.block // tile) ** 2)
        sampled_kernel[grid](
            Matrix.of(a), Matrix.of(b), out, places, len(columns), inner, BLOCK=index.block, T=tile, INNER=_INNER
        )
    return out


@where_its_tensor_is
def expanded(packed: Tensor, b: Tensor, index: BlockIndex, *, transposed: bool) -> Tensor:
    """The packed matrix, or its transpose, times b: b [B, H, K, N] to [B, H, M, N]."""
    batch, heads, _, width = b.shape
    lines = index.num_columns if transposed else index.num_rows
    offsets, others = (index.column_offsets, index.rows) if transposed else (index.row_offsets, index.columns)
    out = b.new_empty(batch, heads, lines * index.block, width)
    if not out.numel():
        return out
    # A program reads the places of transposed blocks; those of a row are where its offsets say.
    entries = index.packed_entries.int() if transposed else others
    rows, tile = min(_WIDEST, index.block), min(_WIDEST, max(16, int(triton.next_power_of_2(width))))
    grid = (heads * lines * (index.block // rows), triton.cdiv(width, tile), batch)
    expanded_kernel[grid](
        packed.contiguous(),
        Matrix.of(b),
        out,
        offsets,
        others,
        entries,
        lines,
        packed.size(1),
        width,
        BLOCK=index.block,
        T=rows,
        WIDTH=tile,
        TRANSPOSED=transposed,
    )
    return out


@where_its_tensor_is
def softmax(
    packed: Tensor, scale: float, bias: Tensor | None, key_bias: Tensor | None, index: BlockIndex, out: Tensor
) -> None:
    """Softmax along rows of scale * packed + bias + key_bias into contiguous `out`, which may be `packed`.

    bias is packed, [B|1, nnz, block, block], and key_bias [B, Sk]; where either is -inf nothing is attended. A row
    that attends nothing is 0. Sums are float32.
    """
    batch, entries, block, _ = packed.shape
    if not packed.numel():
        return
    written = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    scores = Scores(
        packed.contiguous(),
        packed if bias is None else bias.contiguous(),
        packed if key_bias is None else key_bias.contiguous(),
        index.columns,
        entries,
        0 if bias is None or bias.size(0) == 1 else entries,
        index.num_columns * block,
        scale,
    )
    softmax_kernel[(len(index.row_offsets) - 1, batch)](
        scores,
        written,
        index.row_offsets,
        BLOCK=block,
        HAS_BIAS=bias is not None,
        HAS_KEY_BIAS=key_bias is not None,
        num_warps=_softmax_warps(block),
    )
    if written is not out:
        out.copy_(written)


@where_its_tensor_is
def softmax_backward(d_out: Tensor, out: Tensor, index: BlockIndex) -> Tensor:
    """The gradient of the scores, scaled and biased, of their softmax `out`: packed, float32."""
    batch, entries, block, _ = out.shape
    d_scores = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    if d_scores.numel():
        softmax_backward_kernel[(len(index.row_offsets) - 1, batch)](
            d_out.contiguous(),
            out.contiguous(),
            d_scores,
            index.row_offsets,
            entries,
            BLOCK=block,
            num_warps=_softmax_warps(block),
        )
    return d_scores


def _softmax_warps(block: int) -> int:
    """So many that a block of float32 stays in registers."""
    return 8 if block >= 128 else 4
