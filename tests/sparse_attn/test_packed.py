"""Products and softmaxes of packed blocks: every mode against its definition, gradients of first and second order, the
packed order, what is empty, what is not finite, and refusals."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.refusing import refused
from tests.sparse_attn.cases import HEADS, ROWS, check_products, check_softmax, masks, random_layout, relative_error
from tests.sparse_attn.cases import reference_block_sparse_matmul as reference_matmul
from tests.sparse_attn.cases import reference_block_sparse_softmax as reference_softmax
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
def test_kernels(block: int, width: int, dtype: torch.dtype, monkeypatch) -> None:
    check_products(batched, block, width, dtype, TOLERANCES[dtype])
    bias, key_bias = masks(block)
    check_softmax(batched, block, dtype, TOLERANCES[dtype])
    check_softmax(batched, block, dtype, TOLERANCES[dtype], bias=bias, key_bias=key_bias)
    if (block, dtype) == (16, torch.float32):
        monkeypatch.setattr(batched, "_GATHERED", 1)  # in pieces
        check_products(batched, block, 5, dtype, 1e-6)
        check_softmax(batched, block, dtype, 1e-6, key_bias=key_bias)


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
    expected = reference_matmul(a, b, layout, mode, **transposed)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    torch.testing.assert_close(
        torch.autograd.grad(found, (a, b), weight), torch.autograd.grad(expected, (a, b), weight)
    )


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
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_shared_layout_with_masks_by_head(in_place: bool) -> None:
    layout = Custom(torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]]).bool(), 16)
    x = torch.randn(2, 3 * 5, 16, 16, requires_grad=True)
    mask = torch.rand(2, 3, 48, 48) < 0.7
    padding = torch.rand(2, 48) < 0.9
    added = torch.zeros(2, 3, 48, 48, dtype=torch.float64).masked_fill_(~(mask & padding[:, None, None]), -math.inf)
    doubled = x.detach().double().requires_grad_()
    expected = reference_softmax(doubled, layout, 3, 48, bias=added)
    given = x * 1
    given.retain_grad()
    out = block_sparse_softmax(given, layout, attn_mask=mask, key_padding_mask=padding, heads=3, in_place=in_place)
    assert (out.data_ptr() == given.data_ptr()) is in_place
    assert relative_error(out, expected) < 1e-6
    weight = torch.randn_like(out)
    (wanted,) = torch.autograd.grad(expected, doubled, weight.double())
    out.backward(weight)
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


def test_nothing_at_all_and_autocast() -> None:
    layout = Custom(torch.zeros(2, 3, 3).bool(), 16)
    a = torch.randn(2, 2, 48, 5, requires_grad=True)
    scores = block_sparse_matmul(a, a, layout, "sdd", trans_b=True)
    assert scores.shape == (2, 0, 16, 16)
    out = block_sparse_matmul(block_sparse_softmax(scores, layout), a, layout, "dsd")
    assert out.shape == a.shape
    assert not out.any()
    (gradient,) = torch.autograd.grad(out.sum(), a)
    assert not gradient.any()
    with torch.autocast("cpu", torch.bfloat16):
        assert block_sparse_matmul(a, a, Dense(2), "sdd", trans_b=True).dtype == torch.bfloat16
    shared = Custom(torch.zeros(3, 3).bool(), 16)
    assert block_sparse_matmul(a, a, shared, "sdd", trans_b=True).shape == (2, 0, 16, 16)


LAYOUT, DENSE = Dense(2, 16), torch.randn(1, 2, 32, 8)
PACKED = torch.randn(1, 8, 16, 16)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda matmul: matmul(DENSE, DENSE, LAYOUT, "ssd"),
            ValueError,
            "mode is 'ssd', expected one of sdd, dsd, dds",
        ),
        (lambda matmul: matmul(DENSE, DENSE, LAYOUT, "sdd"), ValueError, "a's columns as b's rows"),
        (lambda matmul: matmul(DENSE, DENSE[:, :, :8], LAYOUT, "sdd"), ValueError, "got 8 columns, .* block of 16"),
        (
            lambda matmul: matmul(PACKED[:, :7], DENSE, LAYOUT, "dsd"),
            ValueError,
            r"a has .* 7, .* packed .* 8, 16, 16\]",
        ),
        (
            lambda matmul: matmul(PACKED, torch.randn(1, 2, 48, 8), Custom(torch.ones(2, 2, 2).bool(), 16), "dsd"),
            ValueError,
            "b has 48 along the product: the block mask is for 2 x 2 blocks",
        ),
        (lambda matmul: matmul(PACKED, DENSE.double(), LAYOUT, "dsd"), TypeError, r"torch\.float32 and torch\.float64"),
        (lambda matmul: matmul(PACKED, DENSE.expand(3, -1, -1, -1), LAYOUT, "dsd"), ValueError, "one batch size"),
        (lambda matmul: matmul(PACKED, torch.randn(1, 3, 32, 8), LAYOUT, "dsd"), ValueError, "for 2 heads, expected 3"),
        (lambda _: block_sparse_softmax(PACKED, LAYOUT), ValueError, "give length="),
        (lambda _: block_sparse_softmax(PACKED, LAYOUT, length=48), ValueError, r"x has .* packed .* 18, 16, 16\]"),
        (lambda _: block_sparse_softmax(PACKED, torch.ones(2, 2, 2)), TypeError, "expected a layout, got Tensor"),
        (lambda _: pack_blocks(PACKED[0], LAYOUT), ValueError, "dense tensor"),
    ],
)
def test_refusals(call, error: type[Exception], message: str) -> None:
    refused(error, message, call, block_sparse_matmul)
