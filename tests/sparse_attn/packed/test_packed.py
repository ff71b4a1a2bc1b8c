"""Products and softmaxes of packed blocks: every mode against its definition, gradients of first and second order, the
packed order, what is empty, what is not finite, and refusals."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.sparse_attn.cases import relative_error
from tests.sparse_attn.packed.body import HEADS, ROWS, check_products, check_softmax, masks, random_layout
from tests.sparse_attn.packed.reference import reference_block_sparse_matmul, reference_block_sparse_softmax
from thinwire.sparse_attn import (
    BigBird,
    Custom,
    Dense,
    block_sparse_matmul,
    block_sparse_softmax,
    pack_blocks,
    reference_attention,
    unpack_blocks,
)
from thinwire.sparse_attn.kernels import batched

CASES = list(itertools.product(("sdd", "dsd", "dds"), (False, True), (False, True)))
TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize(
    ("block", "width", "dtype"),
    [
        *((16, 24, dtype) for dtype in TOLERANCES),
        (32, 7, torch.float32),
        (32, 7, torch.bfloat16),
        (128, 65, torch.float16),
    ],
)
def test_kernels(block: int, width: int, dtype: torch.dtype) -> None:
    check_products(batched, block, width, dtype, TOLERANCES[dtype])
    bias, key_bias = masks(block)
    check_softmax(batched, block, dtype, TOLERANCES[dtype])
    check_softmax(batched, block, dtype, TOLERANCES[dtype], bias=bias, key_bias=key_bias)


def test_kernels_in_pieces(monkeypatch) -> None:
    monkeypatch.setattr(batched, "_GATHERED", 1)
    check_products(batched, 16, 5, torch.float32, 1e-6)
    check_softmax(batched, 16, torch.float32, 1e-6, key_bias=masks(16)[1])


def operands(layout: Custom, mode: str, *, trans_a: bool, trans_b: bool, heads: int) -> tuple[Tensor, Tensor]:
    """Random a and b for a product whose third size is 9, in float64, with gradients."""
    rows, columns = (size * layout.block for size in layout.block_mask.shape[1:])
    packed = pack_blocks(torch.randn(3, heads, rows, columns, dtype=torch.float64), layout)
    a = torch.randn(3, heads, *((9, rows) if trans_a else (rows, 9)), dtype=torch.float64)
    b = torch.randn(3, heads, *((columns, 9) if trans_b else (9, columns)), dtype=torch.float64)
    if mode == "dsd":
        inner = rows if trans_a else columns
        a, b = packed, torch.randn(3, heads, *((9, inner) if trans_b else (inner, 9)), dtype=torch.float64)
    if mode == "dds":
        inner = columns if trans_b else rows
        a, b = torch.randn(3, heads, *((inner, 9) if trans_a else (9, inner)), dtype=torch.float64), packed
    return a.requires_grad_(), b.requires_grad_()


@pytest.mark.parametrize(
    ("mode", "trans_a", "trans_b", "shared"),
    [*((*case, False) for case in CASES), *((mode, True, False, True) for mode in ("sdd", "dsd", "dds"))],
)
def test_every_mode_and_its_gradients(mode: str, trans_a: bool, trans_b: bool, shared: bool) -> None:
    torch.manual_seed(ROWS)
    layout = random_layout(16, seed=1)
    if shared:
        layout = Custom(layout.block_mask[1], 16)
    transposed = {"trans_a": trans_a, "trans_b": trans_b}
    a, b = operands(layout, mode, **transposed, heads=3 if shared else HEADS)
    found = block_sparse_matmul(a, b, layout, mode, **transposed)
    expected = reference_block_sparse_matmul(a, b, layout, mode, **transposed)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, (a, b), weight), torch.autograd.grad(expected, (a, b), weight), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_second_derivatives() -> None:
    layout = Custom(torch.tensor([[1, 0], [1, 1]]).bool(), 16)
    a, b = (0.1 * torch.randn(1, 1, 32, 2, dtype=torch.float64) for _ in range(2))
    a, b = a.requires_grad_(), b.requires_grad_()

    def loss(a: Tensor, b: Tensor) -> Tensor:
        scores = block_sparse_matmul(a, b, layout, "sdd", trans_b=True)
        return block_sparse_matmul(scores.square(), b, layout, "dsd", trans_a=True).sum()

    assert torch.autograd.gradgradcheck(loss, (a, b))


def test_the_order_is_that_of_the_mask() -> None:
    layout = BigBird(3, 16, different_layout_per_head=True)
    dense = torch.randn(2, 3, 96, 96)
    packed = pack_blocks(dense, layout)
    places = layout.make_layout(96).nonzero().tolist()
    assert packed.shape == (2, len(places), 16, 16)
    for entry, (head, row, column) in enumerate(places):
        block = dense[:, head, 16 * row : 16 * (row + 1), 16 * column : 16 * (column + 1)]
        assert torch.equal(packed[:, entry], block)
    held = layout.make_layout(96).bool().repeat_interleave(16, 1).repeat_interleave(16, 2)
    assert torch.equal(unpack_blocks(packed, layout, 3, 96, 96, fill=-1.0), dense.where(held, torch.tensor(-1.0)))


def test_the_three_make_attention() -> None:
    layout = BigBird(2, 16, different_layout_per_head=True)
    q, k, v = (torch.randn(3, 2, 112, 8, requires_grad=True) for _ in range(3))
    padding, rpe = torch.rand(3, 112) < 0.8, torch.randn(2, 112, 112, requires_grad=True)
    scores = block_sparse_matmul(q, k, layout, "sdd", trans_b=True)
    kept = block_sparse_softmax(scores, layout, scale=8**-0.5, rpe=rpe, key_padding_mask=padding)
    out = block_sparse_matmul(kept, v, layout, "dsd")
    expected = reference_attention(q, k, v, layout, key_padding_mask=padding, rpe=rpe)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(one, (q, k, v, rpe), weight) for one in (out, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_shared_layout_with_masks_by_head(in_place: bool) -> None:
    layout = Custom(torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]]).bool(), 16)
    x = torch.randn(2, 3 * 5, 16, 16, requires_grad=True)
    mask = torch.rand(2, 3, 48, 48) < 0.7
    padding = torch.rand(2, 48) < 0.9
    added = torch.zeros(2, 3, 48, 48, dtype=torch.float64).masked_fill_(~(mask & padding[:, None, None]), -math.inf)
    doubled = x.detach().double().requires_grad_()
    expected = reference_block_sparse_softmax(doubled, layout, 3, 48, bias=added)
    given = x * 1
    given.retain_grad()
    out = block_sparse_softmax(given, layout, attn_mask=mask, key_padding_mask=padding, heads=3, in_place=in_place)
    assert (out.data_ptr() == given.data_ptr()) is in_place
    assert relative_error(out, expected) < 1e-6
    weight = torch.randn_like(out)
    (wanted,) = torch.autograd.grad(expected, doubled, weight.double())
    out.backward(weight)
    assert given.grad is not None
    assert relative_error(given.grad, wanted) < 1e-6


def test_what_is_not_finite_stays_where_it_is() -> None:
    layout = Custom(torch.tensor([[[1, 0], [0, 1]]]).bool(), 16)
    b = torch.randn(1, 1, 32, 4)
    b[0, 0, 20] = math.nan
    out = block_sparse_matmul(torch.ones(1, 2, 16, 16), b, layout, "dsd")
    assert out[:, :, :16].isfinite().all()
    assert out[:, :, 16:].isnan().all()
    x = torch.zeros(1, 2, 16, 16)
    x[0, 0, 3, 5], x[0, 0, 4, 6], x[0, 1] = math.nan, math.nan, -math.inf
    masked = torch.ones(1, 32, dtype=torch.bool)
    masked[0, 5] = False
    out = block_sparse_softmax(x, layout, key_padding_mask=masked)
    assert out[0, 0, 3].sum() == 1
    assert out[0, 0, 4].isnan().all()
    assert not out[0, 1].any()


def test_nothing_at_all() -> None:
    layout = Custom(torch.zeros(2, 3, 3).bool(), 16)
    a = torch.randn(2, 2, 48, 5, requires_grad=True)
    scores = block_sparse_matmul(a, a, layout, "sdd", trans_b=True)
    assert scores.shape == (2, 0, 16, 16)
    out = block_sparse_matmul(block_sparse_softmax(scores, layout), a, layout, "dsd")
    assert out.shape == a.shape
    assert not out.any()
    (gradient,) = torch.autograd.grad(out.sum(), a)
    assert not gradient.any()
    shared = Custom(torch.zeros(3, 3).bool(), 16)
    assert block_sparse_matmul(a, a, shared, "sdd", trans_b=True).shape == (2, 0, 16, 16)


def test_autocast() -> None:
    q = torch.randn(1, 2, 32, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert block_sparse_matmul(q, q, Dense(2), "sdd", trans_b=True).dtype == torch.bfloat16


def test_refusals() -> None:
    layout, a = Dense(2, 16), torch.randn(1, 2, 32, 8)
    packed = torch.randn(1, 8, 16, 16)
    with pytest.raises(ValueError, match="mode is 'ssd', expected one of sdd, dsd, dds"):
        block_sparse_matmul(a, a, layout, "ssd")
    with pytest.raises(ValueError, match="a's columns as b's rows"):
        block_sparse_matmul(a, a, layout, "sdd")
    with pytest.raises(ValueError, match="got 8 columns, expected a multiple of the layout's block of 16"):
        block_sparse_matmul(a, a[:, :, :8], layout, "sdd")
    with pytest.raises(ValueError, match=r"a has shape \[1, 7, 16, 16\], expected packed blocks .* 8, 16, 16\]"):
        block_sparse_matmul(packed[:, :7], a, layout, "dsd")
    square = Custom(torch.ones(2, 2, 2).bool(), 16)
    with pytest.raises(ValueError, match="b has 48 along the product: the block mask is for 2 x 2 blocks"):
        block_sparse_matmul(packed, torch.randn(1, 2, 48, 8), square, "dsd")
    with pytest.raises(TypeError, match=r"torch\.float32 and torch\.float64"):
        block_sparse_matmul(packed, a.double(), layout, "dsd")
    with pytest.raises(ValueError, match="one batch size"):
        block_sparse_matmul(packed, a.expand(3, -1, -1, -1), layout, "dsd")
    with pytest.raises(ValueError, match="the layout is for 2 heads, expected 3"):
        block_sparse_matmul(packed, torch.randn(1, 3, 32, 8), layout, "dsd")
    with pytest.raises(ValueError, match="give length="):
        block_sparse_softmax(packed, layout)
    with pytest.raises(ValueError, match=r"x has shape \[1, 8, 16, 16\], expected packed blocks .* 18, 16, 16\]"):
        block_sparse_softmax(packed, layout, length=48)
    with pytest.raises(TypeError, match="expected a layout, got Tensor"):
        block_sparse_softmax(packed, torch.ones(2, 2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dense tensor"):
        pack_blocks(packed[0], layout)
