"""Block-sparse attention on GPUs: launches the Triton kernels over the items of a plan, then over its merges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from thinwire.sparse_attn.block_index import BlockIndex
from thinwire.sparse_attn.dropout import keep_threshold
from thinwire.sparse_attn.kernels.triton.backward_keys import keys_kernel
from thinwire.sparse_attn.kernels.triton.backward_queries import queries_kernel
from thinwire.sparse_attn.kernels.triton.forward import forward_kernel, merge_kernel
from thinwire.sparse_attn.kernels.triton.gradients import add_parts_kernel
from thinwire.sparse_attn.kernels.triton.plan import Plans, Work

__all__ = ["backward", "forward"]

_LOG2_E = 1.4426950408889634
_SMALLEST_WIDTH = 16  # of a product on tensor cores

_plans = Plans()


@dataclass(frozen=True)
class _Call:
    """What the kernels of one call have in common."""

    index: BlockIndex
    heads: int
    query_length: int
    key_length: int
    width: int
    key_bias: Tensor
    bias: Tensor
    has_key_bias: bool
    has_bias: bool
    causal: bool
    scale: float
    dropout_p: float
    tile: int
    padded: int

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        index: BlockIndex,
        key_bias: Tensor | None,
        bias: Tensor | None,
        causal: bool,
        scale: float,
        dropout_p: float,
        *,
        in_forward: bool,
    ) -> _Call:
        """From a kernel's arguments; a mask that is not there is stood for by one number that nobody reads."""
        nothing = torch.zeros(1, device=q.device)
        padded = max(_SMALLEST_WIDTH, int(triton.next_power_of_2(q.size(3))))
        return cls(
            index,
            q.size(1),
            q.size(2),
            k.size(2),
            q.size(3),
            nothing if key_bias is None else key_bias.contiguous(),
            nothing if bias is None else bias,
            key_bias is not None,
            bias is not None,
            causal,
            scale,
            dropout_p,
            _tile(index.block, padded, q.dtype, in_forward=in_forward),
            padded,
        )

    def plans(self) -> tuple[Work, Work]:
        """Along rows and along columns."""
        lengths = (self.query_length, self.key_length)
        return _plans.get(self.index, self.heads, lengths, self.tile, causal=self.causal)

    def numbers(self, slots: int) -> tuple[Any, ...]:
        """Strides of the bias, sizes, scale in exponents of two, dropout."""
        strides = (0, 0, 0, 0)
        if self.has_bias:
            batch, head, row, step = self.bias.stride()
            strides = (batch if self.bias.size(0) > 1 else 0, head if self.bias.size(1) > 1 else 0, row, step)
        sizes = (self.heads, self.query_length, self.key_length, self.width, slots)
        return *strides, *sizes, self.scale * _LOG2_E, keep_threshold(self.dropout_p), 1 / (1 - self.dropout_p)

    def options(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        return {
            "CAUSAL": self.causal,
            "HAS_KEY_BIAS": self.has_key_bias,
            "HAS_BIAS": self.has_bias,
            "DROPOUT": self.dropout_p > 0,
            "BLOCK": self.index.block,
            **self.shape(),
        }

    def shape(self) -> dict[str, Any]:
        """A tile's shape, and warps for it."""
        warps = 8 if self.tile * self.padded > 64 * 64 else 4
        return {"T": self.tile, "WIDTH": self.padded, "num_warps": warps, "num_stages": 2}

    def parts(self, work: Work, batch: int) -> Tensor:
        """Where the parts of long rows are put down: float32 [B, slots, T, WIDTH]."""
        return torch.empty(batch, max(work.slots, 1), self.tile, self.padded, device=self.bias.device)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: BlockIndex,
    key_bias: Tensor | None,
    bias: Tensor | None,
    seed: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Sq, D] like q, and float32 log-sum-exp [B, H, Sq], +inf where nothing is attended."""
    call = _Call.of(q, k, index, key_bias, bias, causal, scale, dropout_p, in_forward=True)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    work, _ = call.plans()
    part_out = call.parts(work, q.size(0))
    part_lse = torch.empty(part_out.shape[:3], device=q.device)
    forward_kernel[(len(work.items), q.size(0))](
        q,
        k,
        v,
        out,
        lse,
        call.key_bias,
        call.bias,
        seed,
        work.items,
        work.entries,
        work.masks,
        part_out,
        part_lse,
        *_strides(q, k, v, out),
        *call.numbers(work.slots),
        **call.options(),
    )
    if len(work.merges):
        merge_kernel[(len(work.merges), q.size(0))](
            out,
            lse,
            work.merges,
            part_out,
            part_lse,
            *_strides(out),
            call.heads,
            call.query_length,
            call.width,
            work.slots,
            **call.shape(),
        )
    return out, lse


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    index: BlockIndex,
    key_bias: Tensor | None,
    bias: Tensor | None,
    seed: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout_p: float,
    needs_d_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and, if asked for, of bias, in its shape.

    A bias that several heads or samples share has its gradient summed from one of [B, H, Sq, Sk].
    """
    call = _Call.of(q, k, index, key_bias, bias, causal, scale, dropout_p, in_forward=False)
    d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    batch = q.size(0)
    wanted = bias if needs_d_bias else None
    d_bias = None if wanted is None else wanted.new_zeros(batch, call.heads, call.query_length, call.key_length)
    if q.numel() == 0 or k.numel() == 0:
        return d_q.zero_(), d_k, d_v, None if wanted is None else torch.zeros_like(wanted)
    delta = (d_out.float() * out.float()).sum(-1)
    rows, columns = call.plans()
    parts = call.parts(rows, batch)
    queries_kernel[(len(rows.items), batch)](
        d_out,
        q,
        k,
        v,
        lse,
        delta,
        d_q,
        call.key_bias,
        call.bias,
        call.bias if d_bias is None else d_bias,
        seed,
        rows.items,
        rows.entries,
        rows.masks,
        parts,
        *_strides(d_out, q, k, v, d_q),
        *call.numbers(rows.slots),
        scale,
        NEEDS_D_BIAS=d_bias is not None,
        **call.options(),
    )
    _add_parts(call, d_q, rows, parts, call.query_length)
    k_parts, v_parts = call.parts(columns, batch), call.parts(columns, batch)
    keys_kernel[(len(columns.items), batch)](
        d_out,
        q,
        k,
        v,
        lse,
        delta,
        d_k,
        d_v,
        call.key_bias,
        call.bias,
        seed,
        columns.items,
        columns.entries,
        columns.masks,
        k_parts,
        v_parts,
        *_strides(d_out, q, k, v, d_k, d_v),
        *call.numbers(columns.slots),
        scale,
        **call.options(),
    )
    _add_parts(call, d_k, columns, k_parts, call.key_length)
    _add_parts(call, d_v, columns, v_parts, call.key_length)
    if d_bias is None or wanted is None:
        return d_q, d_k, d_v, None
    return d_q, d_k, d_v, d_bias.sum_to_size(wanted.shape)


def _tile(block: int, padded: int, dtype: torch.dtype, *, in_forward: bool) -> int:
    """Tokens of a tile: what tensor cores like, so far as rows of `padded` elements fit the 163 KB of shared memory."""
    if dtype == torch.float32:
        return 64 if padded <= 64 else 64 * 64 // padded
    return 128 if in_forward and block >= 128 and padded <= 128 else 64


def _strides(*tensors: Tensor) -> list[int]:
    """Of batch, head and row of each."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _add_parts(call: _Call, target: Tensor, work: Work, parts: Tensor, length: int) -> None:
    if len(work.merges):
        add_parts_kernel[(len(work.merges), target.size(0))](
            target, work.merges, parts, *_strides(target), length, call.width, work.slots, **call.shape()
        )
