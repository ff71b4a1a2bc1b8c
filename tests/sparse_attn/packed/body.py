"""Checks of one set of kernels of packed blocks against the definition in float64, which every backend has to pass."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.sparse_attn.cases import relative_error
from tests.sparse_attn.packed.reference import reference_block_sparse_matmul, reference_block_sparse_softmax
from thinwire.sparse_attn.layouts.named import Custom
from thinwire.sparse_attn.packed import gather

HEADS, ROWS, COLUMNS = 2, 3, 4


def random_layout(block: int, seed: int, *, square: bool = False) -> Custom:
    """Different blocks per head; a row and a column that hold none, and a row that holds all."""
    mask = torch.rand(HEADS, ROWS, ROWS if square else COLUMNS, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[0, 1], mask[1, :, 0], mask[1, 2, 1:] = False, False, True
    return Custom(mask, block)


def check_products(kernels: ModuleType, block: int, width: int, dtype: torch.dtype, tolerance: float) -> None:
    """Blocks of a product, and packed blocks, turned or not, times a dense matrix; strided inputs too."""
    layout = random_layout(block, seed=width)
    index = layout.index(ROWS * block, COLUMNS * block)
    generator = torch.Generator().manual_seed(block)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    a, b = random(3, ROWS * block, HEADS, width).transpose(1, 2), random(3, HEADS, COLUMNS * block, width).mT
    found = kernels.sampled(a, b, index)
    expected = reference_block_sparse_matmul(a.double(), b.double(), layout, "sdd")
    assert found.dtype == dtype
    assert relative_error(found, expected) < tolerance
    packed = random(3, *found.shape[1:])
    for transposed, dense in ((False, random(3, HEADS, COLUMNS * block, width)), (True, a)):
        found = kernels.expanded(packed, dense, index, transposed=transposed)
        wanted = reference_block_sparse_matmul(packed.double(), dense.double(), layout, "dsd", trans_a=transposed)
        assert relative_error(found, wanted) < tolerance
        empty = (slice(None), 1, slice(0, block)) if transposed else (slice(None), 0, slice(block, 2 * block))
        assert not found[empty].any()


def check_softmax(kernels: ModuleType, block: int, dtype: torch.dtype, tolerance: float, **biases: Any) -> None:
    """Probabilities and the gradient of scores, with the biases that are given, in place or not."""
    layout = random_layout(block, seed=block, square=True)
    length = ROWS * block
    index = layout.index(length)
    generator = torch.Generator().manual_seed(block)
    x = torch.randn(3, index.columns.numel(), block, block, generator=generator).to(dtype)
    d_out = torch.randn(x.shape, generator=generator).to(dtype)
    bias, key_bias = biases.get("bias"), biases.get("key_bias")
    dense = torch.zeros((), dtype=torch.float64)
    packed_bias = None
    if bias is not None:
        dense = dense + bias
        packed_bias = gather(bias.expand(-1, HEADS, -1, -1), index)
    if key_bias is not None:
        dense = dense + key_bias[:, None, None].double()
    doubled = x.to(torch.float64, copy=True).requires_grad_()
    expected = reference_block_sparse_softmax(doubled, layout, HEADS, length, scale=0.3, bias=dense)
    (d_doubled,) = torch.autograd.grad(expected, doubled, d_out.double())
    out = torch.empty_like(x)
    kernels.softmax(x, 0.3, packed_bias, key_bias, index, out)
    assert relative_error(out, expected) < tolerance
    d_scores = kernels.softmax_backward(d_out, out, index)
    assert relative_error(d_scores * 0.3, d_doubled) < tolerance
    kernels.softmax(x, 0.3, packed_bias, key_bias, index, x)
    assert torch.equal(x, out)


def masks(block: int) -> tuple[Tensor, Tensor]:
    """A bias of pairs for one sample and all heads and one of keys, both with much that is masked."""
    length = ROWS * block
    generator = torch.Generator().manual_seed(7 * block)
    bias = torch.randn(1, HEADS, length, length, generator=generator)
    bias[torch.rand(bias.shape, generator=generator) < 0.3] = -torch.inf
    bias[0, 1, 5] = -torch.inf  # a query that attends nothing
    key_bias = torch.zeros(3, length)
    key_bias[:, ::3] = -torch.inf
    return bias, key_bias
