"""The registered operators: torch's own checks of them, torch.compile, repeatability."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.sparse_attn.cases import layouts, qkv
from thinwire.sparse_attn import BigBird, Custom, Variable, block_sparse_attention

OPERATORS = torch.ops.thinwire


def arguments(length: int, bias: Tensor | None) -> tuple[object, ...]:
    index = layouts(16)["bigbird"].index(length)
    pattern = (index.row_offsets, index.columns, index.column_offsets, index.rows)
    return (*pattern, torch.randn(2, length), bias, torch.tensor([5]), 16, index.num_heads, False, 0.3, 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("learned_bias", [False, True])
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


def test_compiles_whole_with_gradients_and_dropout() -> None:
    layout = BigBird(2)
    inputs = qkv(77, 8)
    rpe = torch.randn(2, 77, 77, requires_grad=True)

    def function(q: Tensor, k: Tensor, v: Tensor, rpe: Tensor) -> Tensor:
        return 2 * block_sparse_attention(q, k, v, layout, rpe=rpe, dropout_p=0.2)

    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(3)
        out = run(*inputs, rpe)
        results.append([out, *torch.autograd.grad(out.square().sum(), [*inputs, rpe])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_code_serves_every_layout_and_length(dynamic: bool | None) -> None:
    blocks = torch.eye(4, dtype=torch.bool)
    windows = [Variable(2, local_window_blocks=[size]) for size in (1, 2)]
    cases = [(one, length) for one in windows for length in (64, 77)]
    cases += [(Custom(blocks), 64), (Custom(~blocks), 64), (BigBird(2), 112)]
    torch.compiler.reset()
    compiled = torch.compile(block_sparse_attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for layout, length in cases:
        inputs = qkv(length, 8)
        results = []
        for run in (compiled, block_sparse_attention):
            out = run(*inputs, layout)
            results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)


def test_derivatives_that_do_not_exist_are_errors_and_not_zeros() -> None:
    inputs, layout = qkv(40, 8), BigBird(2)
    (d_q,) = torch.autograd.grad(block_sparse_attention(*inputs, layout).sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        d_q.square().sum().backward()
    q, k, v = (x.detach() for x in inputs)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: block_sparse_attention(q, x, v, layout), (k,), (v,))


def test_no_gradient_of_a_mask_nobody_learns() -> None:
    inputs = qkv(32, 8)
    mask = torch.randn(32, 32)
    block_sparse_attention(*inputs, BigBird(2, num_sliding_window_blocks=1), attn_mask=mask).sum().backward()
    assert mask.grad is None
    assert all(x.grad is not None for x in inputs)
