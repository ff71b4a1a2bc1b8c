"""Block-sparse attention on GPUs: launches the Triton kernels over the items of a plan, then over its merges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.sparse_attn.dropout import keep_threshold
from thinwire.sparse_attn.kernels.triton.arguments import Biases, Config, Dropout, Heads, Sizes, Walk
from thinwire.sparse_attn.kernels.triton.backward_keys import keys_kernel
from thinwire.sparse_attn.kernels.triton.backward_queries import queries_kernel
from thinwire.sparse_attn.kernels.triton.device import capability, where_its_tensor_is
from thinwire.sparse_attn.kernels.triton.forward import forward_kernel, merge_kernel
from thinwire.sparse_attn.kernels.triton.gradients import add_parts_kernel
from thinwire.sparse_attn.kernels.triton.plan import Plans, Work
from thinwire.sparse_attn.kernels.triton.shapes import Kernel, Shape, shape
from thinwire.sparse_attn.pattern import Pattern

__all__ = ["backward", "forward"]

_LOG2_E = 1.4426950408889634
_SMALLEST_WIDTH = 16  # of a product on tensor cores

_plans = Plans()


@dataclass(frozen=True)
class _Call:
    """One kernel's call, and those of what adds up its parts."""

    pattern: Pattern
    batch: int
    sizes: Sizes
    shape: Shape
    padded: int

    @classmethod
    def of(cls, kernel: Kernel, q: Tensor, k: Tensor, pattern: Pattern) -> _Call:
        """From a backend's arguments."""
        batch, heads, queries, width = q.shape
        padded = max(_SMALLEST_WIDTH, int(triton.next_power_of_2(width)))
        chosen = shape(kernel, q.dtype, pattern.index.block, padded, capability(q))
        return cls(pattern, batch, Sizes(heads, queries, k.size(2), width), chosen, padded)

    def plans(self) -> tuple[Work, Work]:
        """Along rows and along columns."""
        lengths = (self.sizes.queries, self.sizes.keys)
        return _plans.get(self.pattern.index, self.sizes.heads, lengths, self.shape.tile, causal=self.pattern.causal)

    def scores(self) -> dict[str, Any]:
        """What every kernel that calculates scores is told about them, and what it is compiled for."""
        kept = 1 / (1 - self.pattern.dropout_p)
        return {
            "sizes": self.sizes,
            "biases": Biases.of(self.pattern.key_bias, self.pattern.bias, nothing=self.pattern.seed),
            "dropout": Dropout(self.pattern.seed, keep_threshold(self.pattern.dropout_p), kept),
            "scale": self.pattern.scale * _LOG2_E,
            **self.options(),
        }

    def options(self) -> dict[str, Any]:
        """What kernels are compiled for, a tile's shape and warps for it among them."""
        wanted = (
            self.pattern.causal,
            self.pattern.key_bias is not None,
            self.pattern.bias is not None,
            self.pattern.dropout_p > 0,
            self.pattern.index.block,
            self.shape.tile,
            self.shape.step,
            self.padded,
        )
        config = Config(*map(tl.constexpr, wanted))
        return {"config": config, "num_warps": self.shape.warps, "num_stages": self.shape.stages}

    def parts(self, work: Work) -> Tensor:
        """Where the parts of long rows are put down: float32 [B, slots, T, WIDTH]."""
        shape = (self.batch, max(work.slots, 1), self.shape.tile, self.padded)
        return torch.empty(shape, device=self.pattern.seed.device)


@where_its_tensor_is
def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Output [B, H, Sq, D] like q, and float32 log-sum-exp [B, H, Sq], +inf where nothing is attended."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    call = _Call.of("forward", q, k, pattern)
    work, _ = call.plans()
    parts = call.parts(work)
    part_lse = torch.empty(parts.shape[:3], device=q.device)
    forward_kernel[(len(work.items), call.batch)](
        *map(Heads.of, (q, k, v, out)), lse, _walk(work), parts, part_lse, **call.scores()
    )
    if len(work.merges):
        merge_kernel[(len(work.merges), call.batch)](
            Heads.of(out), lse, work.merges, work.slots, parts, part_lse, call.sizes, **call.options()
        )
    return out, lse


@where_its_tensor_is
def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pattern: Pattern, *, needs_d_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and, if asked for, of the pattern's bias, in its shape.

    A bias that several heads or samples share has its gradient summed from one of [B, H, Sq, Sk].
    """
    bias = pattern.bias if needs_d_bias else None
    d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if q.numel() == 0 or k.numel() == 0:
        return d_q.zero_(), d_k, d_v, None if bias is None else torch.zeros_like(bias)
    d_bias = None if bias is None else bias.new_zeros(*q.shape[:3], k.size(2))
    delta = (d_out.float() * out.float()).sum(-1)
    inputs = (*map(Heads.of, (d_out, q, k, v)), lse, delta)

    call = _Call.of("queries", q, k, pattern)
    rows, _ = call.plans()
    parts = call.parts(rows)
    queries_kernel[(len(rows.items), call.batch)](
        *inputs, Heads.of(d_q), d_bias, _walk(rows), parts, factor=pattern.scale, **call.scores()
    )
    _add_parts(call, d_q, rows, parts)

    call = _Call.of("keys", q, k, pattern)
    _, columns = call.plans()
    k_parts, v_parts = call.parts(columns), call.parts(columns)
    keys_kernel[(len(columns.items), call.batch)](
        *inputs, Heads.of(d_k), Heads.of(d_v), _walk(columns), k_parts, v_parts, factor=pattern.scale, **call.scores()
    )
    _add_parts(call, d_k, columns, k_parts)
    _add_parts(call, d_v, columns, v_parts)
    return d_q, d_k, d_v, None if d_bias is None or bias is None else d_bias.sum_to_size(bias.shape)


def _walk(work: Work) -> Walk:
    return Walk(work.items, work.entries, work.masks, work.slots)


def _add_parts(call: _Call, target: Tensor, work: Work, parts: Tensor) -> None:
    if len(work.merges):
        length, width = target.shape[2:]
        add_parts_kernel[(len(work.merges), call.batch)](
            Heads.of(target), work.merges, work.slots, parts, length, width, **call.options()
        )
