"""Masks as users give them, boolean or additive, turned into the two float tensors that kernels add to the scores.

A mask over keys alone stays [B, Sk]; only what depends on the query too becomes a [B|1, H|1, Sq, Sk] tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


def additive_mask(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`mask` as a tensor of `dtype` to add to scores: boolean True becomes 0 and False -inf; floats are kept.

    A float at the lowest value of its own dtype means "masked" too, as in Hugging Face's masks, and becomes -inf:
    such a position then holds back a NaN, and a row of them gives 0 and not the mean of what was masked.
    """
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)
    return mask.to(dtype).masked_fill(mask <= torch.finfo(mask.dtype).min, -math.inf)


def biases(
    masks: Mapping[str, Tensor | None], sizes: tuple[int, int, int, int], dtype: torch.dtype = torch.float32
) -> tuple[Tensor | None, Tensor | None]:
    """What is added to every score of a key, [batch, keys], and to the score of a query and a key, [batch|1, heads|1,
    queries, keys]: both of `dtype`, or None.

    `masks`: "key_padding_mask" [batch, keys]; "attn_mask" [queries, keys], or 4-D with each size whole or 1; "rpe"
    [queries, keys], [heads|1, queries, keys] or 4-D likewise; or None. `sizes`: batch, heads, queries and keys. An
    attn_mask that says the same of every head and query, as Hugging Face's padding masks do, is added to keys, but for
    a learned one. Gradients flow through attn_mask and rpe.

    Raises ValueError for another shape, TypeError for a wrong dtype.
    """
    (batch, _, _, keys), of_keys, of_pairs = sizes, [], []
    padding, attn_mask, rpe = (masks[name] for name in ("key_padding_mask", "attn_mask", "rpe"))
    if padding is not None:
        _require_mask_dtype("key_padding_mask", padding)
        if padding.shape != (batch, keys):
            raise ValueError(
                f"key_padding_mask has shape {list(padding.shape)}, expected [batch, keys] = [{batch}, {keys}]; pass a "
                "mask over queries and keys as attn_mask"
            )
        if padding.requires_grad:
            raise ValueError("key_padding_mask requires a gradient, which it never gets; pass a learned bias as rpe")
        of_keys.append(additive_mask(padding, dtype))
    if attn_mask is not None:
        _require_mask_dtype("attn_mask", attn_mask)
        alike = attn_mask.dim() == 4 and attn_mask.shape[1:3] == (1, 1) and not attn_mask.requires_grad
        if alike and attn_mask.shape[0] in (1, batch) and attn_mask.shape[3] in (1, keys):
            of_keys.append(additive_mask(attn_mask[:, 0, 0].expand(batch, keys), dtype))
        else:
            shapes = "[queries, keys] or [batch|1, heads|1, queries|1, keys|1]"
            of_pairs.append(additive_mask(_four_dimensional("attn_mask", attn_mask, sizes, (2, 4), shapes), dtype))
    if rpe is not None:
        if not rpe.is_floating_point():
            raise TypeError(f"rpe has dtype {rpe.dtype}, expected floating point; pass a boolean mask as attn_mask")
        shapes = "[queries, keys], [heads|1, queries, keys] or [batch|1, heads|1, queries|1, keys|1]"
        of_pairs.append(_four_dimensional("rpe", rpe, sizes, (2, 3, 4), shapes).to(dtype))
    key_bias, bias = (sum(parts[1:], parts[0]) if parts else None for parts in (of_keys, of_pairs))
    return key_bias, bias


class Biases(NamedTuple):
    """What is added to scores: float32 [B, Sk] for keys and [B|1, H|1, Sq, Sk] for pairs, with the latter's strides in
    elements, 0 where one sample or head serves all."""

    keys: Any
    pairs: Any
    batch: Any
    head: Any
    row: Any
    column: Any

    @classmethod
    def of(cls, keys: Tensor | None, pairs: Tensor | None, nothing: Tensor) -> Biases:
        """The two that `biases` gives; a tensor, `nothing`, stands for one that is None."""
        keys = nothing if keys is None else keys.contiguous()
        if pairs is None:
            return cls(keys, nothing, 0, 0, 0, 0)
        batch, head, row, column = pairs.stride()
        return cls(keys, pairs, batch if pairs.size(0) > 1 else 0, head if pairs.size(1) > 1 else 0, row, column)


def _four_dimensional(
    name: str, given: Tensor, sizes: tuple[int, int, int, int], dimensions: tuple[int, ...], shapes: str
) -> Tensor:
    """`given` as [batch|1, heads|1, query_length, key_length], a view, or an error that names the shapes allowed."""
    batch, heads, query_length, key_length = sizes
    view = given[(None,) * (4 - given.dim())] if given.dim() in dimensions else None
    # Not `size in (1, whole)`: torch.compile does not find sizes that it keeps as symbols in a tuple.
    if view is None or any(size != 1 and size != whole for size, whole in zip(view.shape, sizes, strict=True)):
        wanted = f"batch {batch}, heads {heads}, queries {query_length}, keys {key_length}"
        raise ValueError(f"{name} has shape {list(given.shape)}, expected {shapes} with {wanted}")
    return view.expand(view.shape[0], view.shape[1], query_length, key_length)


def _require_mask_dtype(name: str, mask: Tensor) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"{name} has dtype {mask.dtype}, expected bool (True = attend) or floating point (added to the scores); "
            f"turn a mask of ones and zeros into booleans with mask.bool()"
        )
