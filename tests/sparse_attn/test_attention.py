"""The kernels against the dense specification in float64: values and gradients, every layout, mask and dtype."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.pairwise import pairwise
from tests.sparse_attn.cases import BLOCKS, HEADS, doubles, layouts, qkv, relative_error
from thinwire.sparse_attn import BigBird, Custom, Dense, block_sparse_attention, reference_attention

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
        with pytest.raises(TypeError, match="float64"):
            block_sparse_attention(*qkv(32, 8, torch.float64), Dense(HEADS))


def test_training_after_inference_mode() -> None:
    layout, inputs = BigBird(HEADS), qkv(64, 8)
    with torch.inference_mode():
        block_sparse_attention(*(x.detach() for x in inputs), layout)
    block_sparse_attention(*inputs, layout).sum().backward()
    assert all(x.grad is not None for x in inputs)


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
    with pytest.raises(error, match=says):
        block_sparse_attention(**{"layout": Dense(HEADS), **arguments, **change})  # type: ignore[arg-type]
