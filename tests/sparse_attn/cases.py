"""Layouts, inputs and a relative error that tests of sparse attention share; what every backend's kernels must do, for
any shape, mask and dropout; and the specification of packed blocks, on dense matrices in plain torch."""

import dataclasses
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from thinwire.sparse_attn import BigBird, BSLongformer, Custom, Dense, Fixed, Layout, LocalSlidingWindow, Variable
from thinwire.sparse_attn import pack_blocks as pack
from thinwire.sparse_attn import unpack_blocks as unpack
from thinwire.sparse_attn.block_index import Pattern
from thinwire.sparse_attn.packed import gather
from thinwire.sparse_attn.reference import dense_attention

HEADS = 2
BLOCKS = 5


def layouts(block: int) -> dict[str, Layout]:
    """One of each kind, for HEADS heads and BLOCKS blocks, a last short one included."""
    generator = torch.Generator().manual_seed(block)
    custom = torch.rand(HEADS, BLOCKS, BLOCKS, generator=generator) < 0.4
    custom[0, 1] = False
    return {
        "dense": Dense(HEADS, block),
        "fixed": Fixed(HEADS, block, num_local_blocks=2, horizontal_global_attention=True),
        "fixed_causal": Fixed(HEADS, block, num_local_blocks=2, attention="unidirectional"),
        "variable": Variable(HEADS, block, True, num_random_blocks=1, local_window_blocks=(1, 2)),
        "bigbird": BigBird(HEADS, block, True),
        "bigbird_causal": BigBird(HEADS, block, attention="unidirectional"),
        "longformer": BSLongformer(HEADS, block),
        "local": LocalSlidingWindow(HEADS, block),
        "custom": Custom(custom, block),
    }


def qkv(length: int, head_size: int, dtype: torch.dtype = torch.float32, batch: int = 2) -> list[Tensor]:
    """Random q, k, v in the memory order that a model's projections give."""
    return [
        torch.randn(batch, length, HEADS, head_size, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)
    ]


def doubles(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in tensors]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|, Euclidean, or the difference itself where nothing is expected."""
    expected = expected.detach().double()
    scale = float(expected.norm())
    difference = float((actual.detach().double() - expected).norm())
    return difference / scale if scale > 0 else difference


# Attention: the dense definition in float64


def check(
    kernels: ModuleType,
    layout: Layout,
    lengths: tuple[int, int],
    width: int,
    *,
    batch: int = 2,
    dtype: torch.dtype = torch.float32,
    causal: bool = False,
    dropout_p: float = 0.0,
    with_key_bias: bool = False,
    bias_heads: tuple[int, int] | None = None,
    tolerance: float = 2e-6,
) -> None:
    (queries, keys), heads = lengths, layout.num_heads
    q, d_out = (torch.randn(batch, heads, queries, width, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(batch, heads, keys, width, dtype=dtype) for _ in range(2))
    inputs = [one.double().requires_grad_() for one in (q, k, v)]
    masks: dict[str, Tensor] = {}
    if with_key_bias:
        masks["key_bias"] = torch.randn(batch, keys)
        masks["key_bias"][:, -keys // 4 :] = -math.inf
    doubled = {name: one.double() for name, one in masks.items()}
    if bias_heads is not None:
        masks["bias"] = torch.randn(*bias_heads, queries, keys)
        masks["bias"][..., ::5, ::3] = -math.inf
        doubled["bias"] = masks["bias"].double().requires_grad_()
        inputs.append(doubled["bias"])
    seed, causal = torch.randint(0, 2**62, (1,)), causal or layout.causal
    index = layout.index(queries, keys)
    pattern = Pattern(index, masks.get("key_bias"), masks.get("bias"), seed, causal, scale=0.3, dropout_p=dropout_p)
    exact = dataclasses.replace(pattern, **doubled)
    expected, expected_lse = dense_attention(*inputs[:3], exact)
    gradients = torch.autograd.grad(expected, inputs, d_out.double())

    out, lse = kernels.forward(q, k, v, pattern)
    *found, d_bias = kernels.backward(d_out, q, k, v, out, lse, pattern, needs_d_bias="bias" in masks)
    found += [] if d_bias is None else [d_bias]
    assert relative_error(out, expected.detach()) < tolerance
    finite = lse.isfinite()
    assert torch.equal(finite, expected_lse.isfinite())
    assert relative_error(lse[finite], expected_lse.detach()[finite]) < 1e-6
    for value, wanted in zip(found, gradients, strict=True):
        assert relative_error(value, wanted) < tolerance


def attend(
    kernels: ModuleType, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, layout: Layout, key_bias: Tensor | None = None
):
    seed = torch.zeros(1, dtype=torch.int64)
    pattern = Pattern(layout.index(q.shape[2]), key_bias, None, seed, layout.causal, scale=0.2, dropout_p=0.0)
    out, lse = kernels.forward(q, k, v, pattern)
    return out, lse, *kernels.backward(d_out, q, k, v, out, lse, pattern, needs_d_bias=False)[:3]


def check_rows_that_attend_nothing(kernels: ModuleType) -> None:
    mask = torch.ones(1, 3, 3, dtype=torch.bool)
    mask[0, 1] = False
    out, lse, *gradients = attend(kernels, *torch.randn(4, 1, 1, 48, 16), Custom(mask, 16))
    assert (out[:, :, 16:32] == 0).all()
    assert (lse[:, :, 16:32] == math.inf).all()
    assert (gradients[0][:, :, 16:32] == 0).all()
    assert all(one.isfinite().all() for one in gradients)


def check_empty(kernels: ModuleType, shape: tuple[int, ...]) -> None:
    found = attend(kernels, *torch.randn(4, *shape), Dense(2, 16))
    assert [tuple(one.shape) for one in found] == [shape, shape[:3], shape, shape, shape]


def check_leaks(kernels: ModuleType, poison: float) -> None:
    """What is not attended reaches nothing."""
    layout = BigBird(1, 16, num_random_blocks=0, num_global_blocks=0, attention="unidirectional")
    q, k, v, d_out = torch.randn(4, 1, 1, 96, 16)
    key_bias = torch.zeros(1, 96)
    key_bias[0, 5] = -math.inf
    clean = attend(kernels, q, k, v, d_out, layout, key_bias)
    for one in (k, v):
        one[:, :, 5] = poison  # no query attends it
        one[:, :, 40] = poison  # queries 40 to 63 do: the rest of its block and the next one
    dirty = attend(kernels, q, k, v, d_out, layout, key_bias)
    untouched = [number for number in range(96) if not 40 <= number < 64]
    for before, after in zip(clean[:3], dirty[:3], strict=True):  # out, lse, d_q
        torch.testing.assert_close(after[:, :, untouched], before[:, :, untouched])
    assert not dirty[0][:, :, 40:64].isfinite().all(-1).any()
    # Keys and values of rows that touched queries do not attend.
    far = [number for number in range(96) if number < 16 or number >= 64]
    for before, after in zip(clean[3:], dirty[3:], strict=True):
        torch.testing.assert_close(after[:, :, far], before[:, :, far])


# Packed blocks: differentiable by autograd, and in any floating dtype


def reference_block_sparse_matmul(
    a: Tensor, b: Tensor, layout: Custom, mode: str, *, trans_a: bool = False, trans_b: bool = False
) -> Tensor:
    """The same as `block_sparse_matmul`, argument for argument, with zeros where the layout has no block."""

    def dense(packed: Tensor, heads: int) -> Tensor:
        rows, columns = (size * layout.block for size in layout.block_mask.shape[1:])
        return unpack(packed, layout, heads, rows, columns)

    left = dense(a, b.size(1)) if mode == "dsd" else a
    right = dense(b, a.size(1)) if mode == "dds" else b
    product = (left.mT if trans_a else left) @ (right.mT if trans_b else right)
    return pack(product, layout) if mode == "sdd" else product


def reference_block_sparse_softmax(
    x: Tensor, layout: Custom, heads: int, length: int, *, scale: float = 1.0, bias: Tensor | None = None
) -> Tensor:
    """`block_sparse_softmax` on dense scores [B, heads, length, length], with all its masks joined in an additive
    `bias` that such scores can be added to."""
    inside = unpack(torch.ones_like(x), layout, heads, length, length) > 0
    scores = unpack(x, layout, heads, length, length) * scale
    if bias is not None:
        inside = inside & (bias != -torch.inf)
        scores = scores + torch.where(bias == -torch.inf, 0.0, bias)
    scores = torch.where(inside, scores, -torch.inf)
    # A row of -inf alone has no softmax: it takes one of zeros, which the second mask takes away with its gradient.
    attends = (scores != -torch.inf).any(-1, keepdim=True)
    dense = torch.where(inside, torch.softmax(torch.where(attends, scores, 0.0), -1), 0.0) * attends
    return pack(dense, layout)


ROWS, COLUMNS = 3, 4


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
