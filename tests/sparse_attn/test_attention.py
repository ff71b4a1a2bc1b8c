"""The kernels against the dense specification in float64, values and gradients, every layout, mask and dtype; the
specification itself against torch's own attention; the registered operators, torch's checks of them, and the module."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.pairwise import pairwise
from tests.refusing import refused
from tests.sparse_attn.cases import BLOCKS, HEADS, doubles, layouts, qkv, relative_error
from thinwire.sparse_attn import (
    BigBird,
    Custom,
    Dense,
    SparseSelfAttention,
    Variable,
    block_sparse_attention,
    reference_attention,
)
from thinwire.sparse_attn.reference import keep_mask, token_mask

KINDS = list(layouts(16))
MASKS = ["none", "padding", "padding_float", "attn_bool", "attn_float_4d", "rpe", "all_and_dropout"]


def masks(kind: str, batch: int, length: int) -> dict[str, Tensor]:
    padding = torch.rand(batch, length) < 0.8
    attends = torch.rand(length, length) < 0.8
    rpe = torch.randn(HEADS, length, length, requires_grad=True)
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "padding_float": {"key_padding_mask": torch.where(padding, torch.randn(batch, length), -math.inf)},
        "attn_bool": {"attn_mask": attends},
        "attn_float_4d": {"attn_mask": torch.randn(batch, 1, 1, length)},
        "rpe": {"rpe": rpe},
        "all_and_dropout": {"key_padding_mask": padding, "attn_mask": attends, "rpe": rpe, "dropout_p": 0.3},
    }[kind]


def run(function, inputs, layout, options, d_out):  # type: ignore[no-untyped-def]
    torch.manual_seed(7)
    out = function(*inputs, layout, **options)
    wanted = [*inputs, *([options["rpe"]] if "rpe" in options else [])]
    return [out, *torch.autograd.grad(out, wanted, d_out.to(out.dtype))]


@pytest.mark.parametrize(("mask", "block", "kind"), pairwise(list(MASKS), [16, 32, 64], list(KINDS)))
def test_values_and_gradients_are_the_references(kind: str, block: int, mask: str) -> None:
    torch.manual_seed(block)
    length = BLOCKS * block - 3
    layout = layouts(block)[kind]
    inputs, options = qkv(length, 16), masks(mask, 2, length)
    exact = {n: v.detach().double().requires_grad_() if n == "rpe" else v for n, v in options.items()}
    d_out = torch.randn(2, HEADS, length, 16)
    actual = run(block_sparse_attention, inputs, layout, options, d_out)
    expected = run(reference_attention, doubles(inputs), layout, exact, d_out)
    for one, other in zip(actual, expected, strict=True):
        assert relative_error(one, other) < 1e-5


def test_cross_attention_with_a_rectangular_layout() -> None:
    layout = Custom(torch.tensor([[True, False, True], [False, True, True]]))
    q, k, v = torch.randn(2, 3, 20, 8), torch.randn(2, 3, 41, 8), torch.randn(2, 3, 41, 8)
    actual = block_sparse_attention(q, k, v, layout)
    assert relative_error(actual, reference_attention(q.double(), k.double(), v.double(), layout)) < 1e-5


def test_autocast_casts_as_torchs_own_attention_does() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert block_sparse_attention(*qkv(32, 8), Dense(HEADS)).dtype == torch.bfloat16
        refused(TypeError, "float64", block_sparse_attention, *qkv(32, 8, torch.float64), Dense(HEADS))


def test_dropping_almost_everything() -> None:
    inputs = qkv(32, 8)
    assert not block_sparse_attention(*inputs, Dense(HEADS), dropout_p=1 - 1e-12).any()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"layout": torch.ones(3, 3, dtype=torch.bool)}, TypeError, "expected a layout, got Tensor.*Custom"),
        ({"layout": Dense(3)}, ValueError, "3 heads, expected 2"),
        ({"layout": BigBird(HEADS, 16, num_sliding_window_blocks=9)}, ValueError, "num_sliding_window_blocks"),
        ({"layout": Custom(torch.ones(7, 7, dtype=torch.bool))}, ValueError, "7 x 7"),
        ({"q": torch.randn(2, HEADS, 16, 8), "causal": True}, ValueError, "as many queries as keys"),
        ({"q": torch.randn(HEADS, 33, 8)}, ValueError, "batch, heads, length"),
        ({"q": torch.randn(2, 4, 33, 8), "layout": Dense(4)}, ValueError, "repeat"),
        ({"v": torch.randn(2, HEADS, 33, 9)}, ValueError, "one shape"),
        ({"q": torch.randn(2, HEADS, 33, 8).double()}, TypeError, "float64"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p"),
        ({"key_padding_mask": torch.ones(2, 32, dtype=torch.bool)}, ValueError, r"\[2, 33\]"),
        ({"key_padding_mask": torch.ones(2, 33, dtype=torch.int64)}, TypeError, r"mask.bool\(\)"),
        ({"key_padding_mask": torch.ones(2, 33, requires_grad=True)}, ValueError, "rpe"),
        ({"attn_mask": torch.ones(33, 34)}, ValueError, "attn_mask has shape"),
        ({"attn_mask": torch.ones(33, 33, dtype=torch.int32)}, TypeError, "int32"),
        ({"rpe": torch.ones(33, 33, dtype=torch.bool)}, TypeError, "attn_mask"),
        ({"rpe": torch.ones(5, 33, 33)}, ValueError, "rpe has shape"),
        ({"rpe": torch.ones(33, 33, device="meta")}, ValueError, "meta"),
    ],
)
def test_bad_input(change: dict[str, object], error: type[Exception], says: str) -> None:
    arguments = dict(zip("qkv", (torch.randn(2, HEADS, 33, 8) for _ in range(3)), strict=True))
    refused(error, says, block_sparse_attention, **{"layout": Dense(HEADS), **arguments, **change})


# The specification


def test_it_is_torchs_attention_under_the_same_mask() -> None:
    inputs = doubles(qkv(77, 8))
    for layout in layouts(16).values():
        mask = token_mask(layout.index(77), 77, 77, causal=layout.causal)
        expected = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask)
        out = reference_attention(*inputs, layout)
        torch.testing.assert_close(out, expected.nan_to_num(), atol=1e-12, rtol=0)
        actual = torch.autograd.grad(out.square().sum(), inputs)
        wanted = torch.autograd.grad(expected.nan_to_num().square().sum(), inputs)
        for one, other in zip(actual, wanted, strict=True):
            torch.testing.assert_close(one, other.nan_to_num(), atol=1e-10, rtol=0)


def test_gradients_with_a_masked_nan_stay_finite() -> None:
    q, k, v = (x.detach() for x in doubles(qkv(40, 8)))
    k[:, :, 39] = v[:, :, 38] = math.nan
    inputs = [x.requires_grad_() for x in (q, k, v)]
    padding = torch.arange(40).expand(2, 40) < 38
    out = reference_attention(*inputs, Dense(2), key_padding_mask=padding)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), inputs))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), p=st.floats(0.05, 0.95))
def test_dropout_keeps_its_share_in_every_head_row_and_column(seed: int, p: float) -> None:
    keep = keep_mask(torch.tensor([seed]), 2, 2, 200, 300, p).double()
    for dims, count in (((2, 3), 60_000), ((0, 1, 3), 1200), ((0, 1, 2), 800)):
        sigma = math.sqrt(p * (1 - p) / count)
        assert ((keep.mean(dims) - (1 - p)).abs() < 6 * sigma).all()
    # Neighbouring rows, and heads, are drawn apart.
    assert not torch.equal(keep[0, 0], keep[0, 1])
    assert not torch.equal(keep[..., :-1, :], keep[..., 1:, :])


def test_dropout_follows_the_written_hash() -> None:
    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    seed, p = 0x1234_5678_9ABC_DEF0, 0.4
    keep = keep_mask(torch.tensor([seed]), 2, 3, 5, 7, p)
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 4, 6), (1, 0, 3, 5), (0, 1, 2, 3)):
        head_key = mix(seed % 2**32 ^ mix(((seed >> 32) + (b * 3 + h) * 0x9E3779B9) % 2**32))
        row_key = mix((head_key + i) % 2**32)
        assert bool(keep[b, h, i, j]) == (mix(row_key ^ j * 0x9E3779B9 % 2**32) >= round(p * 2**32))


# The operators

OPERATORS = torch.ops.thinwire


def arguments(length: int, bias: Tensor | None) -> tuple[object, ...]:
    index = layouts(16)["bigbird"].index(length)
    pattern = (index.row_offsets, index.columns, index.column_offsets, index.rows)
    return (*pattern, torch.randn(2, length), bias, torch.tensor([5]), 16, index.num_heads, False, 0.3, 0.1)


@pytest.mark.parametrize(("dtype", "learned_bias"), [(torch.float32, True), (torch.bfloat16, False)])
def test_opcheck(dtype: torch.dtype, learned_bias: bool) -> None:
    bias = torch.randn(1, 2, 77, 77, requires_grad=True) if learned_bias else None
    shared = arguments(77, bias)
    inputs = qkv(77, 8, dtype)
    torch.library.opcheck(OPERATORS.block_sparse_attention.default, (*inputs, *shared))

    q, k, v = (x.detach() for x in inputs)
    shared = arguments(77, None if bias is None else bias.detach())
    out, lse = OPERATORS.block_sparse_attention(q, k, v, *shared)
    backward = OPERATORS.block_sparse_attention_backward.default
    torch.library.opcheck(backward, (out, q, k, v, out, lse, *shared, learned_bias))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.programs
def test_compiled_code_serves_every_layout_and_length(dynamic: bool | None) -> None:
    blocks = torch.eye(4, dtype=torch.bool)
    windows = [Variable(2, local_window_blocks=[size]) for size in (1, 2)]
    cases = [(one, length) for one in windows for length in (64, 77)]
    cases += [(Custom(blocks), 64), (Custom(~blocks), 64), (BigBird(2), 112)]
    torch.compiler.reset()
    compiled = torch.compile(block_sparse_attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for layout, length in cases:
        inputs, options = qkv(length, 8), {"rpe": torch.randn(2, length, length, requires_grad=True), "dropout_p": 0.2}
        d_out = torch.randn(inputs[0].shape)
        results = [run(function, inputs, layout, options, d_out) for function in (compiled, block_sparse_attention)]
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)


def test_derivatives_that_do_not_exist_are_errors_and_not_zeros() -> None:
    inputs, layout = qkv(40, 8), BigBird(2)
    (d_q,) = torch.autograd.grad(block_sparse_attention(*inputs, layout).sum(), inputs[0], create_graph=True)
    refused(NotImplementedError, "no second derivative", d_q.square().sum().backward)
    q, k, v = (x.detach() for x in inputs)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: block_sparse_attention(q, x, v, layout), (k,), (v,))


def test_no_gradient_of_a_mask_nobody_learns() -> None:
    inputs = qkv(32, 8)
    mask = torch.randn(32, 32)
    block_sparse_attention(*inputs, BigBird(2, num_sliding_window_blocks=1), attn_mask=mask).sum().backward()
    assert mask.grad is None
    assert all(x.grad is not None for x in inputs)


# The module


def test_modes_say_the_same_in_their_own_numbers() -> None:
    q, k, v = qkv(50, 8)
    attends = torch.rand(50, 50) < 0.7
    padding = torch.rand(2, 50) < 0.7
    expected = block_sparse_attention(q, k, v, BigBird(2), key_padding_mask=padding, attn_mask=attends)
    added = torch.zeros(2, 50).masked_fill(~padding, -torch.inf)
    users = SparseSelfAttention(BigBird(2))
    assert torch.equal(users(q, k, v, key_padding_mask=added, attn_mask=attends.float()), expected)
    assert torch.equal(users(q, k, v, key_padding_mask=added[:, None, None], attn_mask=attends.long()), expected)
    swapped = SparseSelfAttention(BigBird(2), "mul", "add")
    added = torch.zeros(50, 50).masked_fill(~attends, -torch.inf)
    assert torch.equal(swapped(q, k, v, key_padding_mask=padding.long(), attn_mask=added), expected)
    assert torch.equal(swapped(q, k, v, key_padding_mask=padding, attn_mask=attends), expected)


def test_rpe_is_added_and_learned() -> None:
    q, k, v = qkv(50, 8)
    rpe = torch.randn(2, 50, 50, requires_grad=True)
    out = SparseSelfAttention(Dense(2))(q, k, v, rpe=rpe)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=rpe))
    out.square().sum().backward()
    assert rpe.grad.any()


def test_dropout_in_training_alone() -> None:
    q, k, v = qkv(50, 8)
    layer = SparseSelfAttention(Dense(2), dropout=0.5)
    assert not torch.equal(layer(q, k, v), layer(q, k, v))
    layer.eval()
    assert torch.equal(layer(q, k, v), layer(q, k, v))


def test_refusals_of_the_module() -> None:
    refused(ValueError, "attn_mask_mode is 'or'", SparseSelfAttention, Dense(2), attn_mask_mode="or")
    refused(ValueError, "dropout is 1", SparseSelfAttention, Dense(2), dropout=1)
    with pytest.raises(ValueError, match="50 tokens, max_seq_length is 49"):
        SparseSelfAttention(Dense(2), max_seq_length=49)(*qkv(50, 8))
