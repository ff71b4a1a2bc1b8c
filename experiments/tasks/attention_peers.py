"""What block-sparse attention is measured against: dense attention, gathered blocks, and FlexAttention.

All take q, k, v `[batch, heads, length, head size]` and give `[batch, heads, length, head size]`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from thinwire.sparse_attn import BlockIndex

__all__ = [
    "Attention",
    "compiled_flex_attention",
    "dense_attention",
    "flex_mask",
    "gathered_attention",
    "materialised_attention",
]

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's own attention, which keeps no scores."""
    return F.scaled_dot_product_attention(q, k, v)


def materialised_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as the formula has it, whose scores and probabilities are `[batch, heads, length, length]`."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v


def gathered_attention(index: BlockIndex) -> Attention:
    """Each row of blocks gathers the key and value blocks it attends; torch's own attention does the rest.

    Neighbouring rows that attend equally many blocks go together, so that nothing is padded; a row that attends all
    is dense and gathers nothing. Heads must be alike, and the length whole blocks.
    """
    if index.num_heads != 1:
        raise ValueError(f"expected heads that are all alike, got {index.num_heads} different ones")
    runs = list(_runs(index))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # [batch * heads, rows of blocks, block, head size]
        rows, keys, values = (x.flatten(0, 1).unflatten(1, (-1, index.block)) for x in (q, k, v))
        outputs = []
        for first, last, columns in runs:
            queries = rows[:, first:last]
            if columns.shape[1] == index.num_columns:
                dense = F.scaled_dot_product_attention(queries.flatten(1, 2)[:, None], *(_whole(x) for x in (k, v)))
                outputs.append(dense[:, 0].unflatten(1, (-1, index.block)))
                continue
            gathered = (x[:, columns].flatten(2, 3) for x in (keys, values))
            outputs.append(F.scaled_dot_product_attention(queries, *gathered))
        return torch.cat(outputs, 1).view(q.shape)

    return attend


def compiled_flex_attention(index: BlockIndex, *, mode: str = "default", **kernel_options: Any) -> Attention:
    """FlexAttention on the same blocks, compiled for this length alone; all blocks are whole ones, without a mask.

    mode: torch.compile's, "max-autotune-no-cudagraphs" to have it choose its tiles. kernel_options: Flex's own.
    Earlier ones may be compiled again when they are called again.
    """
    mask = flex_mask(index)
    # A call that failed once, as a backward on CPUs does, would leave all later ones uncompiled, without a word.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True, mode=mode)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=mask, kernel_options=kernel_options or None)
        return out

    return attend


def flex_mask(index: BlockIndex) -> BlockMask:
    """Flex's mask from the index itself, on its device: from a function of tokens it would cost more than attention."""
    heads, rows, columns = index.places
    counts = index.row_offsets.diff().view(index.num_heads, index.num_rows)
    device = index.columns.device
    places = torch.zeros(index.num_heads, index.num_rows, index.num_columns, dtype=torch.int32, device=device)
    within = torch.arange(len(columns), device=device) - index.row_offsets[heads * index.num_rows + rows]
    places[heads, rows, within] = columns.int()
    counts, places = counts[None], places[None]
    nothing = torch.zeros_like(counts), torch.zeros_like(places)
    return BlockMask.from_kv_blocks(*nothing, counts, places, BLOCK_SIZE=index.block)


def _whole(x: Tensor) -> Tensor:
    """`[batch, heads, length, head size]` as `[batch * heads, 1, length, head size]`."""
    return x.flatten(0, 1)[:, None]


def _runs(index: BlockIndex) -> Iterator[tuple[int, int, Tensor]]:
    """Neighbouring rows of equally many blocks: the first, the one after the last, and columns `[rows, blocks]`."""
    counts = index.row_offsets.diff().tolist()
    first = 0
    for count, group in itertools.groupby(counts):
        last = first + len(list(group))
        start, stop = index.row_offsets[first], index.row_offsets[last]
        yield first, last, index.columns[start:stop].view(last - first, count)
        first = last
