"""Matrices of which only a layout's blocks exist, packed one after the other: their places, products and softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinwire.sparse_attn.attention import autocast_like_torch, check_layout
from thinwire.sparse_attn.block_index import BlockIndex
from thinwire.sparse_attn.layouts.base import Layout
from thinwire.sparse_attn.layouts.named import Custom
from thinwire.sparse_attn.masks import biases
from thinwire.sparse_attn.operator import packed_kernels


@dataclass(frozen=True)
class Blocks:
    """The blocks of `heads` heads. `index.num_heads` is `heads`, or 1 where all heads hold the same blocks."""

    index: BlockIndex
    heads: int

    @classmethod
    def of(cls, layout: Layout, heads: int, rows: int | None, columns: int | None, device: torch.device) -> Blocks:
        """The blocks of `rows` x `columns` elements; None is what the layout says, or as the other.

        Raises TypeError for no layout; ValueError where it does not fit, or a size is no whole number of blocks.
        """
        check_layout(layout, heads)
        if isinstance(layout, Custom):
            own_rows, own_columns = (size * layout.block for size in layout.block_mask.shape[1:])
        else:
            own_rows = own_columns = (rows if columns is None else columns) or 0
        whole_rows, whole_columns = own_rows if rows is None else rows, own_columns if columns is None else columns
        for name, size in (("rows", whole_rows), ("columns", whole_columns)):
            if size % layout.block:
                raise ValueError(
                    f"packed blocks are whole: got {size} {name}, expected a multiple of the layout's block of "
                    f"{layout.block}; pad the tensor"
                )
        return cls(layout.index(whole_rows, whole_columns, device), heads)

    @property
    def count(self) -> int:
        """Blocks of all heads together."""
        return self.index.columns.numel() * (self.heads // self.index.num_heads)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of packed blocks, without the batch."""
        return self.count, self.index.block, self.index.block

    def check_packed(self, name: str, packed: Tensor) -> None:
        """Raise ValueError unless `packed` holds these blocks."""
        if packed.dim() != 4 or tuple(packed.shape[1:]) != self.shape:
            raise ValueError(
                f"{name} has shape {list(packed.shape)}, expected packed blocks [batch, blocks of all heads, block, "
                f"block] = [batch, {self.count}, {self.index.block}, {self.index.block}]"
            )

    def fold(self, tensor: Tensor) -> Tensor:
        """Dense [B, H, ...] or packed [B, nnz, ...] with as many heads as the index: heads alike become samples."""
        shared = self.heads // self.index.num_heads
        if shared == 1:
            return tensor
        return tensor.reshape(tensor.size(0) * shared, tensor.size(1) // shared, *tensor.shape[2:])

    def unfold(self, tensor: Tensor) -> Tensor:
        """What `fold` folded."""
        shared = self.heads // self.index.num_heads
        if shared == 1:
            return tensor
        return tensor.reshape(tensor.size(0) // shared, tensor.size(1) * shared, *tensor.shape[2:])


def pack_blocks(dense: Tensor, layout: Layout) -> Tensor:
    """The layout's blocks of dense [B, H, M, N]: [B, blocks of all heads, block, block], differentiable.

    The order is that of `layout.make_layout(n).nonzero()`: head by head, row by row, column by column.
    M and N are multiples of the layout's block. Raises ValueError or TypeError where tensor and layout do not fit.
    """
    if dense.dim() != 4:
        raise ValueError(f"expected a dense tensor [batch, heads, rows, columns], got shape {list(dense.shape)}")
    blocks = Blocks.of(layout, dense.size(1), dense.size(2), dense.size(3), dense.device)
    return blocks.unfold(gather(blocks.fold(dense), blocks.index))


def unpack_blocks(packed: Tensor, layout: Layout, heads: int, rows: int, columns: int, fill: float = 0.0) -> Tensor:
    """The dense tensor [B, heads, rows, columns] of packed blocks, `fill` where the layout has none; differentiable."""
    blocks = Blocks.of(layout, heads, rows, columns, packed.device)
    blocks.check_packed("packed", packed)
    folded = blocks.fold(packed)
    dense = folded.new_full((folded.size(0), blocks.index.num_heads, rows, columns), fill)
    _grid(dense, layout.block)[(slice(None), *blocks.index.places)] = folded
    return blocks.unfold(dense)


def gather(dense: Tensor, index: BlockIndex) -> Tensor:
    """The blocks of dense [B, index.num_heads, M, N], packed."""
    heads, rows, columns = index.places
    return _grid(dense, index.block)[:, heads, rows, columns]


def _grid(dense: Tensor, block: int) -> Tensor:
    """[B, H, M, N] as a view [B, H, M / block, N / block, block, block]."""
    batch, heads, rows, columns = dense.shape
    return dense.view(batch, heads, rows // block, block, columns // block, block).transpose(3, 4)


# Matrix products of which one matrix is packed blocks, with gradients of any order

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
        a, b = a.mT if trans_a else a, b.mT if trans_b else b
        if a.size(1) != b.size(1) or a.size(3) != b.size(2):
            raise ValueError(
                f"expected a and b of as many heads, and a's columns as b's rows; after transposing a is "
                f"{list(a.shape)}, b {list(b.shape)}"
            )
        blocks = Blocks.of(layout, a.size(1), a.size(2), b.size(3), a.device)
        return blocks.unfold(_differentiable(_Sampled, blocks.fold(a), blocks.fold(b), blocks.index))
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


# The softmax along rows of such a matrix


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
    if not isinstance(layout, Layout):
        raise TypeError(f"expected a layout, got {type(layout).__name__}; make one of a mask of blocks with Custom")
    if isinstance(layout, Custom):
        length = None
    elif length is None:  # what the masks say of the number of keys
        masks = [one for one in (rpe, key_padding_mask, attn_mask) if one is not None and one.size(-1) > 1]
        if not masks:
            raise ValueError(
                f"packed blocks do not say how long the sequence is that a {type(layout).__name__} layout is for: give "
                "length="
            )
        length = masks[0].size(-1)
    blocks = Blocks.of(layout, layout.num_heads if heads is None else heads, length, length, x.device)
    blocks.check_packed("x", x)
    index, dtype = blocks.index, torch.float64 if x.dtype == torch.float64 else torch.float32
    queries, keys = index.num_rows * index.block, index.num_columns * index.block
    given = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "rpe": rpe}
    of_keys, bias = biases(given, (x.size(0), blocks.heads, queries, keys), dtype)
    shared = blocks.heads // index.num_heads
    packed_bias = None if bias is None else _packed_bias(bias, blocks, x.size(0))
    if of_keys is not None and shared > 1:
        of_keys = of_keys.repeat_interleave(shared, 0)
    return _differentiable(_Softmax, x, scale, packed_bias, of_keys, blocks, in_place)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: float, bias: Tensor | None, of_keys: Tensor | None, blocks: Blocks, in_place: bool
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


def _packed_bias(bias: Tensor, blocks: Blocks, batch: int) -> Tensor:
    """bias [B|1, H|1, Sq, Sk] as packed blocks of the index's heads: [B|1, nnz, block, block] after folding."""
    if blocks.index.num_heads > 1:
        return gather(bias.expand(-1, blocks.heads, -1, -1), blocks.index)
    if math.prod(bias.shape[:2]) > 1:
        bias = blocks.fold(bias.expand(batch, blocks.heads, -1, -1))
    return gather(bias, blocks.index)
