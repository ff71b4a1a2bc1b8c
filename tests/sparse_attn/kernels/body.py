"""What every backend's kernels must do: the dense definition in float64, for any shape, mask and dropout."""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType

import torch
from torch import Tensor

from thinwire.sparse_attn.block_index import Pattern
from thinwire.sparse_attn.layouts.named import Layout
from thinwire.sparse_attn.reference import dense_attention

__all__ = ["attend", "check"]


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
