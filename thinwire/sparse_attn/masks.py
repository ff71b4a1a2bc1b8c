"""Masks as users give them, boolean or additive, turned into the two float tensors that kernels add to the scores.

A mask over keys alone stays [B, Sk]; only what depends on the query too becomes a [B|1, H|1, Sq, Sk] tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["additive_mask", "attention_bias", "key_bias"]


def additive_mask(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`mask` as a tensor of `dtype` to add to scores: boolean True becomes 0 and False -inf; floats are kept.

    A float at the lowest value of its own dtype means "masked" too, as in Hugging Face's masks, and becomes -inf:
    such a position then holds back a NaN, and a row of them gives 0 and not the mean of what was masked.
    """
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)
    return mask.to(dtype).masked_fill(mask <= torch.finfo(mask.dtype).min, -math.inf)


def key_bias(
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    *,
    batch: int,
    key_length: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor | None:
    """What is added to every score of a key: `dtype` [batch, key_length], or None.

    It joins `key_padding_mask` [batch, key_length] with an `attn_mask` that says the same of every head and query.
    Raises ValueError for another shape, TypeError for a dtype that is neither bool nor floating point.
    """
    parts = []
    if key_padding_mask is not None:
        _require_mask_dtype("key_padding_mask", key_padding_mask)
        if key_padding_mask.shape != (batch, key_length):
            raise ValueError(
                f"key_padding_mask has shape {list(key_padding_mask.shape)}, expected [batch, keys] = "
                f"[{batch}, {key_length}]; pass a mask over queries and keys as attn_mask"
            )
        if key_padding_mask.requires_grad:
            raise ValueError("key_padding_mask requires a gradient, which it never gets; pass a learned bias as rpe")
        parts.append(additive_mask(key_padding_mask, dtype))
    if attn_mask is not None and _is_over_keys_alone(attn_mask, batch, key_length):
        _require_mask_dtype("attn_mask", attn_mask)
        parts.append(additive_mask(attn_mask[:, 0, 0].expand(batch, key_length), dtype))
    return sum(parts[1:], parts[0]) if parts else None


def attention_bias(
    attn_mask: Tensor | None,
    rpe: Tensor | None,
    *,
    batch: int,
    heads: int,
    query_length: int,
    key_length: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor | None:
    """What is added to the score of a query and a key: `dtype` [batch|1, heads|1, query_length, key_length], or None.

    `attn_mask` is [query_length, key_length], or 4-D with each size whole or 1; `rpe` is [query_length, key_length],
    [heads|1, query_length, key_length] or 4-D likewise. Both may be learned: gradients flow through.
    Raises ValueError for another shape, TypeError for a wrong dtype.
    """
    sizes = (batch, heads, query_length, key_length)
    parts = []
    if attn_mask is not None and not _is_over_keys_alone(attn_mask, batch, key_length):
        _require_mask_dtype("attn_mask", attn_mask)
        shapes = "[queries, keys] or [batch|1, heads|1, queries|1, keys|1]"
        parts.append(additive_mask(_four_dimensional("attn_mask", attn_mask, sizes, (2, 4), shapes), dtype))
    if rpe is not None:
        if not rpe.is_floating_point():
            raise TypeError(f"rpe has dtype {rpe.dtype}, expected floating point; pass a boolean mask as attn_mask")
        shapes = "[queries, keys], [heads|1, queries, keys] or [batch|1, heads|1, queries|1, keys|1]"
        parts.append(_four_dimensional("rpe", rpe, sizes, (2, 3, 4), shapes).to(dtype))
    return sum(parts[1:], parts[0]) if parts else None


def _is_over_keys_alone(mask: Tensor, batch: int, key_length: int) -> bool:
    """Whether a 4-D mask says the same of every head and query, as Hugging Face's padding masks do.

    A learned one is left to `attention_bias`, which has a gradient.
    """
    return (
        mask.dim() == 4
        and mask.shape[1] == 1
        and mask.shape[2] == 1
        and mask.shape[0] in (1, batch)
        and mask.shape[3] in (1, key_length)
        and not mask.requires_grad
    )


def _four_dimensional(
    name: str, given: Tensor, sizes: tuple[int, int, int, int], dimensions: tuple[int, ...], shapes: str
) -> Tensor:
    """`given` as [batch|1, heads|1, query_length, key_length], a view, or an error that names the shapes allowed."""
    batch, heads, query_length, key_length = sizes
    view = given[(None,) * (4 - given.dim())] if given.dim() in dimensions else None
    if view is None or any(size not in (1, whole) for size, whole in zip(view.shape, sizes, strict=True)):
        raise ValueError(
            f"{name} has shape {list(given.shape)}, expected {shapes} with "
            f"batch {batch}, heads {heads}, queries {query_length}, keys {key_length}"
        )
    return view.expand(view.shape[0], view.shape[1], query_length, key_length)


def _require_mask_dtype(name: str, mask: Tensor) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"{name} has dtype {mask.dtype}, expected bool (True = attend) or floating point (added to the scores); "
            f"turn a mask of ones and zeros into booleans with mask.bool()"
        )
