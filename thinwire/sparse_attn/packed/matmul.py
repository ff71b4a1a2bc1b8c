"""Matrix products of which one matrix is packed blocks, with gradients of any order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.sparse_attn.attention import autocast_like_torch
from thinwire.sparse_attn.block_index import BlockIndex
from thinwire.sparse_attn.layouts.named import Layout
from thinwire.sparse_attn.operator import packed_kernels
from thinwire.sparse_attn.packed.blocks import Blocks

__all__ = ["MODES", "block_sparse_matmul"]

MODES = ("sdd", "dsd", "dds")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def block_sparse_matmul(
    a: Tensor, b: Tensor, layout: Layout, mode: str, *, trans_a: bool = False, trans_b: bool = False
) -> Tensor:
    """a b, where `mode` says of the result, a and b in turn whether it is packed ("s") or dense ("d").

    - "sdd": the layout's blocks alone of a b; a is [B, H, M, K], b [B, H, K, N], the result packed.
    - "dsd": a is packed blocks of an [M, K] matrix a head, b dense [B, H, K, N]; the result is [B, H, M, N].
    - "dds": a is dense [B, H, M, K], b packed blocks of a [K, N] matrix; the result is [B, H, M, N].

    `trans_a`, `trans_b`: that matrix is given transposed, and the layout is of it as it is given. Packed tensors are
    [B, blocks of all heads, block, block], as `pack_blocks` makes them. Sizes that the layout divides are multiples of
    its block, others are any. float16, bfloat16 (sums are float32), float32 or float64; under autocast both are cast
    first. A row or column that holds no block gives 0, and what is in no block reaches nothing. Gradients of any order.

    Raises ValueError for another mode, or shapes that do not fit; TypeError for dtypes that differ, or no layout.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, expected one of {', '.join(MODES)}")
    a, b = autocast_like_torch(a), autocast_like_torch(b)
    _check(a, b)
    # Every product is one of two: blocks of a dense product, or packed blocks times a dense matrix.
    if mode == "sdd":
        return _sampled(a.mT if trans_a else a, b.mT if trans_b else b, layout)
    if mode == "dsd":
        return _expanded("a", a, "b", b.mT if trans_b else b, layout, transposed=trans_a)
    return _expanded("b", b, "a", a if trans_a else a.mT, layout, transposed=not trans_b).mT


def _check(a: Tensor, b: Tensor) -> None:
    if a.dim() != 4 or b.dim() != 4 or a.size(0) != b.size(0):
        raise ValueError(
            f"expected a and b with four dimensions and one batch size: [batch, heads, rows, columns], or [batch, "
            f"blocks, block, block] where packed; got a {list(a.shape)}, b {list(b.shape)}"
        )
    if a.dtype != b.dtype or a.dtype not in _DTYPES:
        raise TypeError(f"expected a and b of one floating dtype, got {a.dtype} and {b.dtype}")
    if a.device != b.device:
        raise ValueError(f"expected a and b on one device, got {a.device} and {b.device}")


def _sampled(a: Tensor, b: Tensor, layout: Layout) -> Tensor:
    if a.size(1) != b.size(1) or a.size(3) != b.size(2):
        raise ValueError(
            f"expected a and b of as many heads, and a's columns as b's rows; after transposing a is {list(a.shape)}, "
            f"b {list(b.shape)}"
        )
    blocks = Blocks.of(layout, a.size(1), a.size(2), b.size(3), a.device)
    return blocks.unfold(_differentiable(_Sampled, blocks.fold(a), blocks.fold(b), blocks.index))


def _expanded(
    sparse_name: str, sparse: Tensor, dense_name: str, dense: Tensor, layout: Layout, *, transposed: bool
) -> Tensor:
    inner = dense.size(2)
    rows, columns = (inner, None) if transposed else (None, inner)
    try:
        blocks = Blocks.of(layout, dense.size(1), rows, columns, dense.device)
    except ValueError as error:
        raise ValueError(f"{dense_name} has {inner} along the product: {error}") from error
    blocks.check_packed(sparse_name, sparse)
    folded = blocks.fold(sparse), blocks.fold(dense)
    return blocks.unfold(_differentiable(_Expanded, *folded, blocks.index, transposed))


def _differentiable(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class _Sampled(torch.autograd.Function):
    """The blocks of a b."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, index: BlockIndex) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.index = index
        out: Tensor = packed_kernels(a).sampled(a, b, index)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        d_a = d_b = None
        if ctx.needs_input_grad[0]:
            d_a = _differentiable(_Expanded, d_out, b.mT, ctx.index, False)
        if ctx.needs_input_grad[1]:
            d_b = _differentiable(_Expanded, d_out, a, ctx.index, True).mT
        return d_a, d_b, None


class _Expanded(torch.autograd.Function):
    """The packed matrix, or its transpose, times b."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, b: Tensor, index: BlockIndex, transposed: bool) -> Tensor:
        ctx.save_for_backward(packed, b)
        ctx.index, ctx.transposed = index, transposed
        out: Tensor = packed_kernels(b).expanded(packed, b, index, transposed=transposed)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        packed, b = ctx.saved_tensors
        d_packed = d_b = None
        if ctx.needs_input_grad[0]:
            left, right = (b, d_out.mT) if ctx.transposed else (d_out, b.mT)
            d_packed = _differentiable(_Sampled, left, right, ctx.index)
        if ctx.needs_input_grad[1]:
            d_b = _differentiable(_Expanded, packed, d_out, ctx.index, not ctx.transposed)
        return d_packed, d_b, None, None
