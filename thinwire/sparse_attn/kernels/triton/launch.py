"""Block-sparse attention on GPUs: launches the Triton kernels over the items of a plan, then over its merges, on the
GPU that holds the tensors, whichever is current.

Tiles are so large, and shared by so many warps, that sums stay in registers and rows in shared memory; what every
choice costs in registers is in docs/measurements: `python -m experiments.benchmarks.triton_resources`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.sparse_attn.block_index import Heads, Pattern, Sizes
from thinwire.sparse_attn.kernels.triton.attention import (
    add_parts_kernel,
    forward_kernel,
    keys_kernel,
    merge_kernel,
    queries_kernel,
)
from thinwire.sparse_attn.kernels.triton.plan import Config, Dropout, Work, kept_plan
from thinwire.sparse_attn.masks import Biases
from thinwire.sparse_attn.reference import keep_threshold

P = ParamSpec("P")
R = TypeVar("R")

_WITHOUT_A_GPU = (8, 0)  # for Triton's interpreter, which runs on CPU tensors


def guard(tensor: Tensor) -> AbstractContextManager[Any]:
    """Makes `tensor`'s GPU the current one meanwhile: Triton launches there, and allocates and compiles for it."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def where_its_tensor_is(launch: Callable[P, R]) -> Callable[P, R]:
    """Run `launch` on the GPU of its first argument."""

    @functools.wraps(launch)
    def guarded(*arguments: P.args, **settings: P.kwargs) -> R:
        first = arguments[0]
        assert isinstance(first, Tensor)
        with guard(first):
            return launch(*arguments, **settings)

    return guarded


def capability(tensor: Tensor) -> tuple[int, int]:
    """Of the GPU that holds `tensor`: (8, 0) for sm_80."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else _WITHOUT_A_GPU


Kernel = Literal["forward", "queries", "keys"]

_WIDE_PRODUCTS = 9
"""The major capability whose tensor cores read both factors from shared memory: a tile may be wide at once."""


@dataclass(frozen=True)
class Shape:
    """Tokens of a tile, how many of them are taken at a time, warps of a program, stages of its loads."""

    tile: int
    step: int
    warps: int
    stages: int = 2


def shape(kernel: Kernel, dtype: torch.dtype, block: int, padded: int, capability: tuple[int, int]) -> Shape:
    """For rows of `padded` elements, a power of two, and blocks of `block` tokens.

    Tensor cores before sm_90 read factors from registers, where every warp holds the whole of one: fewer tokens at a
    time make that smaller. In float32 each factor is held twice, as what tf32 keeps of it and what it loses, on every
    GPU: Triton 3.7 fails to compile these products of 64 tokens for sm_90.
    """
    wide = capability[0] == _WIDE_PRODUCTS
    if dtype == torch.float32:
        tile = 16 if kernel == "keys" else max(16, min(32, 32 * 64 // padded))
        return Shape(tile, 16, 4)
    if capability[0] > _WIDE_PRODUCTS:
        return Shape(32, 32, 4)  # Triton 3.7 fails to compile tiles of 64 for sm_100
    if wide and kernel != "keys":
        tile = 128 if kernel == "forward" and block >= 128 and padded <= 64 else 64
        return Shape(tile, tile, 8 if tile * padded > 64 * 64 else 4)
    step = 16 if kernel == "keys" and not wide else 32
    return Shape(64, step, 4 if padded <= 64 else 8)


_LOG2_E = 1.4426950408889634
_SMALLEST_WIDTH = 16  # of a product on tensor cores


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
        return kept_plan(self.pattern.index, self.sizes.heads, lengths, self.shape.tile, causal=self.pattern.causal)

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
        pattern = self.pattern
        masked = pattern.causal, pattern.key_bias is not None, pattern.bias is not None, pattern.dropout_p > 0
        return _options(*masked, pattern.index.block, self.shape, self.padded)

    def parts(self, work: Work) -> Tensor:
        """Where the parts of long rows are put down: float32 [B, slots, T, WIDTH]."""
        shape = (self.batch, max(work.slots, 1), self.shape.tile, self.padded)
        return torch.empty(shape, device=self.pattern.seed.device)


@functools.cache  # a launch is the sooner made the more of what it is compiled for is the same object
def _options(
    causal: bool, has_key_bias: bool, has_bias: bool, dropout: bool, block: int, shape: Shape, padded: int
) -> dict[str, Any]:
    wanted = causal, has_key_bias, has_bias, dropout, block, shape.tile, shape.step, padded
    return {"config": Config(*map(tl.constexpr, wanted)), "num_warps": shape.warps, "num_stages": shape.stages}


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
        *map(_heads, (q, k, v, out)), lse, work, parts, part_lse, **call.scores()
    )
    if len(work.merges):
        merge_kernel[(len(work.merges), call.batch)](
            _heads(out), lse, work.merges, work.slots, parts, part_lse, call.sizes, **call.options()
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
    d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if q.numel() == 0 or k.numel() == 0:
        return d_q.zero_(), d_k.zero_(), d_v.zero_(), None if bias is None else torch.zeros_like(bias)
    d_bias = None if bias is None else bias.new_zeros(*q.shape[:3], k.size(2))
    delta = torch.empty_like(lse)
    inputs = (*map(_heads, (d_out, q, k, v)), lse, delta)

    call = _Call.of("queries", q, k, pattern)
    rows, _ = call.plans()
    parts = call.parts(rows)
    queries_kernel[(len(rows.items), call.batch)](
        *inputs, _heads(out), _heads(d_q), d_bias, rows, parts, factor=pattern.scale, **call.scores()
    )
    _add_parts(call, d_q, rows, parts)

    call = _Call.of("keys", q, k, pattern)
    _, columns = call.plans()
    k_parts, v_parts = call.parts(columns), call.parts(columns)
    keys_kernel[(len(columns.items), call.batch)](
        *inputs, _heads(d_k), _heads(d_v), columns, k_parts, v_parts, factor=pattern.scale, **call.scores()
    )
    _add_parts(call, d_k, columns, k_parts)
    _add_parts(call, d_v, columns, v_parts)
    return d_q, d_k, d_v, None if d_bias is None or bias is None else d_bias.sum_to_size(bias.shape)


def _heads(tensor: Tensor) -> Heads:
    return Heads(tensor, *tensor.stride()[:3])


def _add_parts(call: _Call, target: Tensor, work: Work, parts: Tensor) -> None:
    if len(work.merges):
        length, width = target.shape[2:]
        add_parts_kernel[(len(work.merges), call.batch)](
            _heads(target), work.merges, work.slots, parts, length, width, **call.options()
        )
