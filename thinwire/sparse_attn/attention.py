"""The one function of this package: attention over the blocks of a layout, exact, with masks, dropout and gradients.

It checks what it is given and makes every mask additive; the operator and its kernels then trust their arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from thinwire.sparse_attn.layouts.base import Layout
from thinwire.sparse_attn.operator import attend
from thinwire.sparse_attn.reference import make_pattern

_SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST_HEAD_SIZE = 256


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    rpe: Tensor | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale q k^T + masks) v over the blocks that `layout` holds, never forming the S x S scores.

    q is [B, H, Sq, D], k and v are [B, H, Sk, D], all float32, bfloat16 or float16 (softmax and sums are float32);
    returns [B, H, Sq, D] in that dtype. Under autocast the three are cast first. Lengths need not be multiples of the
    layout's block. A query that attends nothing gives 0. A NaN reaches only the queries that attend it. The result is
    the same from run to run. Gradients: q, k, v, rpe and a float attn_mask; the backward recomputes probabilities from
    the saved log-sum-exp (Dao et al., 2022, arXiv:2205.14135, algorithm 4); there is no second derivative, nor a
    forward-mode one. torch.compile takes it whole, one graph for each length and layout.

    - `layout`: `layout.num_heads` is H, or 1 for the same blocks in every head; block 16, 32, 64 or 128.
    - `key_padding_mask` [B, Sk]: boolean, True = attend, or floats added to the scores.
    - `attn_mask` [Sq, Sk], or 4-D with each size whole or 1: boolean, True = attend, or floats added to the scores. A
      4-D mask over keys alone, [B|1, 1, 1, Sk], costs no S x S memory.
    - `rpe` [Sq, Sk], [H|1, Sq, Sk] or 4-D: relative position embedding, floats added to the scores.
    - `causal`: query i attends keys j <= i, exact to the token; implied by a unidirectional layout.
    - `dropout_p` in [0, 1): probabilities dropped, drawn from torch's generator; pass 0 outside training.
    - `scale`: 1 / sqrt(D) unless given.

    Raises ValueError (shapes, lengths, block, devices, dropout_p), TypeError (dtypes, no layout) or NotImplementedError
    (forward-mode differentiation), saying what was expected.
    """
    q, k, v = autocast_like_torch(q), autocast_like_torch(k), autocast_like_torch(v)
    _check_tensors(q, k, v)
    check_layout(layout, q.shape[1])
    if (causal or layout.causal) and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"causal attention needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}; "
            f"attend across lengths with a bidirectional Custom layout and an attn_mask"
        )
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p is {dropout_p}, expected 0 <= dropout_p < 1")
    masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "rpe": rpe}
    for name, mask in masks.items():
        if mask is not None and mask.device != q.device:
            raise ValueError(f"{name} is on {mask.device}, expected q's device {q.device}")
    _refuse_forward_mode(q, k, v, attn_mask, rpe)

    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return attend(q, k, v, make_pattern(q, k, layout, masks, causal=causal, dropout_p=dropout_p, scale=scale))


def autocast_like_torch(x: Tensor) -> Tensor:
    """`x` as torch's own attention would take it under autocast, which leaves float64 alone."""
    device = x.device.type
    # torch.amp.is_autocast_available would break torch 2.11's graphs, and no "meta" tensor may ask for the state.
    if x.dtype not in _SUPPORTED_DTYPES or device == "meta":
        return x
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"expected q, k and v as [batch, heads, length, head size], got {shapes}")
    if k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"expected k and v of one shape, with q's batch and head size, [B, H, Sk, D] = "
            f"[{q.shape[0]}, {q.shape[1]}, Sk, {q.shape[3]}]; got {shapes}"
        )
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"expected as many key and value heads as query heads, got {shapes}; repeat grouped heads with "
            f"k.repeat_interleave(groups, dim=1)"
        )
    if not 1 <= q.shape[3] <= _LARGEST_HEAD_SIZE:
        raise ValueError(f"head size is {q.shape[3]}, expected 1 to {_LARGEST_HEAD_SIZE}; got {shapes}")
    if q.dtype not in _SUPPORTED_DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(
            f"expected q, k and v of one dtype, float32, bfloat16 or float16; got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if k.device != q.device or v.device != q.device:
        raise ValueError(f"expected q, k and v on one device, got {q.device}, {k.device}, {v.device}")


def _refuse_forward_mode(*inputs: Tensor | None) -> None:
    """Torch drops the tangents of an operator's inputs without a word."""
    if torch.compiler.is_compiling():
        return
    if any(
        one is not None and forward_ad.unpack_dual(one).tangent is not None  # type: ignore[no-untyped-call]
        for one in inputs
    ):
        raise NotImplementedError(
            "block-sparse attention has no forward-mode derivative: use reverse mode, or reference_attention"
        )


def check_layout(layout: Layout, heads: int) -> None:
    """Raise TypeError for no layout, ValueError unless it fits `heads` heads."""
    if not isinstance(layout, Layout):
        raise TypeError(f"expected a layout, got {type(layout).__name__}; make one of a mask of blocks with Custom")
    if layout.num_heads not in (1, heads):
        raise ValueError(
            f"the layout is for {layout.num_heads} heads, expected {heads}; make it with num_heads={heads}, "
            f"or with num_heads=1 to share its blocks among all heads"
        )
