"""Block-sparse attention in plain torch on dense masked scores: the specification of every kernel.

It takes S^2 memory and any floating dtype; run in float64 it is what the fused kernels are held against. Dropout
depends on a seed and a position only: no mask is stored, and forward, backward and the reference each work it out again
from the counter-based hash here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.sparse_attn.block_index import BlockIndex, Pattern
from thinwire.sparse_attn.layouts.base import Layout
from thinwire.sparse_attn.masks import biases

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def keep_threshold(dropout_p: float) -> int:
    """The smallest 32-bit hash that is kept: `round(dropout_p * 2**32)`, itself a word of 32 bits."""
    return min(round(dropout_p * 2**32), _WORD)


def head_keys(seed: Tensor, count: int) -> Tensor:
    """The keys of `count` heads, those of the first sample first: int64 [count] below 2**32, on `seed`'s device."""
    head = torch.arange(count, device=seed.device)
    seed_low, seed_high = seed & _WORD, (seed >> 32) & _WORD
    return _mix(seed_low ^ _mix((seed_high + head * _GOLDEN) & _WORD))


def keep_mask(seed: Tensor, batch: int, heads: int, query_length: int, key_length: int, dropout_p: float) -> Tensor:
    """Which probabilities dropout keeps: bool [batch, heads, query_length, key_length], on the seed's device.

    `seed` is int64 [1]. The hash is two rounds of a 32-bit mixer: one makes a key for each row of each head, the
    other a word for each column. int64 tensors hold the uint32 words, cut back to 32 bits after each product.
    """
    device = seed.device
    row = torch.arange(query_length, device=device).view(1, 1, query_length, 1)
    column = torch.arange(key_length, device=device).view(1, 1, 1, key_length)
    head_key = head_keys(seed, batch * heads).view(batch, heads, 1, 1)
    row_key = _mix((head_key + row) & _WORD)
    return _mix(row_key ^ ((column * _GOLDEN) & _WORD)) >= keep_threshold(dropout_p)


def _mix(word: Tensor) -> Tensor:
    """A bijection of 32-bit words in which every input bit moves every output bit."""
    word = word ^ (word >> 16)
    word = (word * 0x7FEB352D) & _WORD
    word = word ^ (word >> 15)
    word = (word * 0x846CA68B) & _WORD
    return word ^ (word >> 16)


def reference_attention(
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
    """The same as `block_sparse_attention`, argument for argument, on dense scores in the dtype of `q`.

    Returns [B, H, Sq, D]. After the same `torch.manual_seed` it drops the same probabilities.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "rpe": rpe}
    pattern = make_pattern(q, k, layout, masks, causal=causal, dropout_p=dropout_p, scale=scale, dtype=dtype)
    return dense_attention(q, k, v, pattern)[0]


def make_pattern(
    q: Tensor,
    k: Tensor,
    layout: Layout,
    masks: Mapping[str, Tensor | None],
    *,
    causal: bool,
    dropout_p: float,
    scale: float | None,
    dtype: torch.dtype = torch.float32,
) -> Pattern:
    """The pattern of attention over `layout`, with masks of `dtype` to add to scores."""
    batch, heads, query_length, head_size = q.shape
    seed = torch.zeros(1, dtype=torch.int64, device=q.device)
    if dropout_p > 0:  # from torch's generator, which `torch.manual_seed` and checkpointing govern
        seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    return Pattern(
        layout.index(query_length, k.shape[2], q.device),
        *biases(masks, (batch, heads, query_length, k.shape[2]), dtype),
        seed,
        causal=causal or layout.causal,
        scale=head_size**-0.5 if scale is None else scale,
        dropout_p=dropout_p,
    )


def dense_attention(q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """A kernel's forward, with a kernel's arguments, differentiable by autograd: output [B, H, Sq, D], lse [B, H, Sq].

    `lse` is the natural log of the sum of exponentials of a row's scores, +inf for a row that attends nothing; such a
    row's output and gradients are 0. What a query does not attend never reaches it, NaN and infinity included.
    """
    batch, heads, query_length, _ = q_bhsd.shape
    key_length = k_bhsd.shape[2]
    of_keys = None if pattern.key_bias is None else pattern.key_bias[:, None, None, :]
    added = [one for one in (of_keys, pattern.bias) if one is not None]
    attends = token_mask(pattern.index, query_length, key_length, causal=pattern.causal).expand(batch, heads, -1, -1)
    for one in added:
        attends = attends & (one != -math.inf)
    finite = all(bool(x.isfinite().all()) for x in (q_bhsd, k_bhsd, v_bhsd))

    products = q_bhsd @ k_bhsd.mT if finite else (q_bhsd[:, :, :, None] * _attended(k_bhsd, attends)).sum(-1)
    scores = pattern.scale * products
    for one in added:
        scores = scores + torch.where(attends, one, 0.0).to(scores.dtype)
    scores = scores.masked_fill(~attends, -math.inf)
    attends_any = attends.any(-1, keepdim=True)
    lse = torch.logsumexp(scores, -1).masked_fill(~attends_any[..., 0], math.inf)

    # A row of -inf alone has no softmax: it takes one of zeros, which the second mask takes away with its gradient.
    probabilities = torch.softmax(scores.masked_fill(~attends_any, 0.0), -1).masked_fill(~attends, 0.0)
    if pattern.dropout_p > 0:
        keep = keep_mask(pattern.seed, batch, heads, query_length, key_length, pattern.dropout_p)
        probabilities = probabilities * keep / (1 - pattern.dropout_p)
    out = probabilities @ v_bhsd if finite else (probabilities[..., None] * _attended(v_bhsd, attends)).sum(-2)
    return out, lse


def _attended(rows: Tensor, attends: Tensor) -> Tensor:
    """Keys or values by query, zeros for those that it does not attend: not even 0 * NaN is in a gradient then."""
    return torch.where(attends[..., None], rows[:, :, None], 0.0)


def token_mask(index: BlockIndex, query_length: int, key_length: int, *, causal: bool) -> Tensor:
    """Which query of which head may attend which key: bool [index.num_heads, query_length, key_length]."""
    blocks = index.dense().to(index.columns.device)
    tokens = blocks.repeat_interleave(index.block, 1).repeat_interleave(index.block, 2)
    tokens = tokens[:, :query_length, :key_length]
    return tokens.tril() if causal else tokens
