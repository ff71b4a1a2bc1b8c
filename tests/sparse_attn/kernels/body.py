"""What every backend's kernels must do: the dense definition in float64, for any shape, mask and dropout."""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType

import torch
from torch import Tensor

from thinwire.sparse_attn.block_index import Pattern
from thinwire.sparse_attn.layouts.named import BigBird, Custom, Dense, Layout
from thinwire.sparse_attn.reference import dense_attention

__all__ = ["attend", "check", "check_empty", "check_leaks", "check_rows_that_attend_nothing"]


def relative(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected).norm() / expected.norm().clamp(min=1e-9))


def check(
    kernels: ModuleType,
    layout: Layout,
    lengths: tuple[int, int],
    width: int,
    *,
    batch: int = 2,
    heads: int = 2,
    dtype: torch.dtype = torch.float32,
    causal: bool = False,
    dropout_p: float = 0.0,
    with_key_bias: bool = False,
    bias_heads: tuple[int, int] | None = None,
    tolerance: float = 2e-6,
) -> None:
    queries, keys = lengths
    q, d_out = (torch.randn(batch, heads, queries, width, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(batch, heads, keys, width, dtype=dtype) for _ in range(2))
    key_bias = bias = None
    if with_key_bias:
        key_bias = torch.randn(batch, keys)
        key_bias[:, -keys // 4 :] = -math.inf
    if bias_heads is not None:
        bias = torch.randn(*bias_heads, queries, keys)
        bias[..., ::5, ::3] = -math.inf
    seed = torch.randint(0, 2**62, (1,))
    causal = causal or layout.causal
    pattern = Pattern(layout.index(queries, keys), key_bias, bias, seed, causal, scale=0.3, dropout_p=dropout_p)

    inputs = [one.double().requires_grad_() for one in (q, k, v)]
    inputs += [] if bias is None else [bias.double().requires_grad_()]
    exact = dataclasses.replace(
        pattern, key_bias=None if key_bias is None else key_bias.double(), bias=None if bias is None else inputs[3]
    )
    expected, expected_lse = dense_attention(*inputs[:3], exact)
    gradients = torch.autograd.grad(expected, inputs, d_out.double())

    out, lse = kernels.forward(q, k, v, pattern)
    *found, d_bias = kernels.backward(d_out, q, k, v, out, lse, pattern, needs_d_bias=bias is not None)
    found += [] if d_bias is None else [d_bias]
    assert relative(out, expected.detach()) < tolerance
    finite = lse.isfinite()
    assert torch.equal(finite, expected_lse.isfinite())
    assert relative(lse[finite], expected_lse.detach()[finite]) < 1e-6
    for value, wanted in zip(found, gradients, strict=True):
        assert relative(value, wanted) < tolerance


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
    out, lse, *gradients = attend(kernels, *torch.randn(4, 1, 2, 48, 16), Custom(mask, 16))
    assert (out[:, :, 16:32] == 0).all()
    assert (lse[:, :, 16:32] == math.inf).all()
    assert (gradients[0][:, :, 16:32] == 0).all()
    assert all(one.isfinite().all() for one in gradients)


def check_empty(kernels: ModuleType, shape: tuple[int, ...]) -> None:
    found = attend(kernels, *torch.randn(4, *shape), Dense(2, 16))
    assert [tuple(one.shape) for one in found] == [shape, shape[:3], shape, shape, shape]


def check_leaks(kernels: ModuleType, poison: float) -> None:
    """What is not attended reaches nothing."""
    layout = BigBird(2, 16, num_random_blocks=0, num_global_blocks=0, attention="unidirectional")
    q, k, v, d_out = torch.randn(4, 1, 2, 96, 16)
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
