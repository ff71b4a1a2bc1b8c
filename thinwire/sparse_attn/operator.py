"""The torch operators `thinwire::block_sparse_attention` and its backward: for each its schema, its fake and what runs.

They take tensors and numbers only, so that torch.compile keeps them whole; the device of `q` picks the kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from thinwire.sparse_attn.block_index import BlockIndex, Pattern

_FORWARD = "thinwire::block_sparse_attention"
_BACKWARD = "thinwire::block_sparse_attention_backward"
_KERNELS = {"cpu": "cpu.launch", "cuda": "triton.launch"}


def attend(q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, pattern: Pattern) -> Tensor:
    """Run the operator on checked arguments: q [B, H, Sq, D], k and v [B, H, Sk, D], biases as `masks.py` makes them.

    Returns [B, H, Sq, D] like q, differentiable in q, k, v and the pattern's bias.
    """
    out: Tensor = torch.ops.thinwire.block_sparse_attention(q_bhsd, k_bhsd, v_bhsd, *_flat(pattern))[0]
    return out


_SHARED = (
    "Tensor row_offsets, Tensor columns, Tensor column_offsets, Tensor rows, "
    "Tensor? key_bias, Tensor? bias, Tensor seed, int block, int index_heads, bool causal, float scale, float dropout_p"
)


_TENSORS, _BIAS = 7, 5  # of the shared arguments: how many are tensors, and which is the bias


def _flat(pattern: Pattern) -> tuple[Any, ...]:
    """A pattern taken apart into the arguments that both operators share, in the schema's order."""
    index = pattern.index
    tensors = (index.row_offsets, index.columns, index.column_offsets, index.rows)
    biases = (pattern.key_bias, pattern.bias, pattern.seed)
    return *tensors, *biases, index.block, index.num_heads, pattern.causal, pattern.scale, pattern.dropout_p


def _pattern(shared: Sequence[Any], q: Tensor, k: Tensor) -> Pattern:
    """The pattern again, for these queries and keys."""
    row_offsets, columns, column_offsets, rows, key_bias, bias, seed, block, heads, *others = shared
    lengths = (-(-q.shape[2] // block), -(-k.shape[2] // block))
    index = BlockIndex(block, heads, *lengths, row_offsets, columns, column_offsets, rows)
    return Pattern(index, key_bias, bias, seed, *others)


def _kernels(device: torch.device) -> ModuleType:
    """The kernels of a device. Imported on first use: numba and triton are slow to load, and triton needs a GPU."""
    if device.type in _KERNELS:
        return importlib.import_module(f"thinwire.sparse_attn.kernels.{_KERNELS[device.type]}")
    raise NotImplementedError(f"block-sparse attention has kernels for cpu and cuda, not for {device}; move q, k and v")


def packed_kernels(like: Tensor) -> ModuleType:
    """The kernels of products and softmaxes of packed blocks for `like`'s device and dtype."""
    on_gpu = like.is_cuda and like.dtype != torch.float64
    return importlib.import_module(f"thinwire.sparse_attn.kernels.{'triton.packed' if on_gpu else 'batched'}")


torch.library.define(
    _FORWARD, f"(Tensor q, Tensor k, Tensor v, {_SHARED}) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag
)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *shared: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _forward(q: Tensor, k: Tensor, v: Tensor, *shared: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    out, lse = _kernels(q.device).forward(q, k, v, _pattern(shared, q, k))
    return out, lse


torch.library.register_fake(_FORWARD, _forward_fake)
torch.library.impl(_FORWARD, "CompositeExplicitAutograd", _forward)

torch.library.define(
    _BACKWARD,
    f"(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_SHARED}, bool needs_d_bias)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _backward_fake(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bias, needs_d_bias = rest[_BIAS], rest[-1]
    d_bias = torch.empty_like(bias) if needs_d_bias and bias is not None else _no_gradient(q)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_bias


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *shared, needs_d_bias = rest
    pattern = _pattern(shared, q, k)
    d_q, d_k, d_v, d_bias = _kernels(q.device).backward(d_out, q, k, v, out, lse, pattern, needs_d_bias=needs_d_bias)
    return d_q, d_k, d_v, _no_gradient(q) if d_bias is None else d_bias


def _no_gradient(like: Tensor) -> Tensor:
    """What stands for a gradient that was not asked for: a schema has no optional results."""
    return like.new_empty(0, dtype=torch.float32)


torch.library.register_fake(_BACKWARD, _backward_fake)
torch.library.impl(_BACKWARD, "CompositeExplicitAutograd", _backward)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *shared = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, *shared[:_TENSORS])
    ctx.numbers = shared[_TENSORS:]
    ctx.needs_d_bias = shared[_BIAS] is not None and shared[_BIAS].requires_grad


def _autograd(ctx: Any, d_out: Tensor, _d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    # Kernels read rows: a gradient expanded from one number, as a sum's is, has none.
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    d_q, d_k, d_v, d_bias = torch.ops.thinwire.block_sparse_attention_backward(
        d_out, q, k, v, out, lse, *tensors, *ctx.numbers, ctx.needs_d_bias
    )
    return d_q, d_k, d_v, None, None, None, None, None, d_bias if ctx.needs_d_bias else None, *(None,) * 6


def _refuse_second_derivative(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    raise NotImplementedError(
        "block-sparse attention has no second derivative: take gradients of gradients through reference_attention, "
        "or leave out create_graph=True"
    )


torch.library.register_autograd(_FORWARD, _autograd, setup_context=_save_for_backward)
# Without it torch would call the second derivative zero.
torch.library.register_autograd(_BACKWARD, _refuse_second_derivative)
