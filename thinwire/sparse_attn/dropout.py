"""Attention dropout that depends on a seed and a position only, so that every backend drops the same probabilities.

No mask is stored: forward, backward and the reference each work it out again from the counter-based hash here.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw_seed", "head_keys", "keep_mask", "keep_threshold"]

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def draw_seed(device: torch.device) -> Tensor:
    """A new seed from torch's generator of `device`: int64 [1]. `torch.manual_seed` and checkpointing govern it."""
    return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=device)


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
