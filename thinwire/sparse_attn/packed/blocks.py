"""Packed blocks: which places of a dense tensor they are, there and back, and the index that a layout gives them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.sparse_attn.attention import check_layout
from thinwire.sparse_attn.block_index import BlockIndex
from thinwire.sparse_attn.layouts.named import Custom, Layout

__all__ = ["Blocks", "gather", "pack_blocks", "unpack_blocks"]


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
        whole_rows, whole_columns = _sizes(layout, rows, columns)
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

    The order is DeepSpeed's, and that of `layout.make_layout(n).nonzero()`: head by head, row by row, column by column.
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


def _sizes(layout: Layout, rows: int | None, columns: int | None) -> tuple[int, int]:
    if isinstance(layout, Custom):
        mask_rows, mask_columns = (size * layout.block for size in layout.block_mask.shape[1:])
        return mask_rows if rows is None else rows, mask_columns if columns is None else columns
    known = rows if rows is not None else columns
    assert known is not None
    return known if rows is None else rows, known if columns is None else columns
