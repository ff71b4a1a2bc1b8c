"""What a kernel is told besides its matrices: which scores there are and what is done to them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinwire.sparse_attn.block_index import BlockIndex

__all__ = ["Pattern"]


@dataclass(frozen=True, eq=False)
class Pattern:
    """Which keys queries attend, and how their scores become probabilities; every backend takes it.

    index: the blocks, on the device of q. key_bias: float32 [B, Sk], added to the scores of a key, or None. bias:
    float32 [B|1, H|1, Sq, Sk], added to scores, or None. Where either is -inf nothing is attended. seed: int64 [1], of
    the dropout. causal: keys of the future are not attended. scale: of the products of queries and keys. dropout_p:
    the share of the probabilities that is dropped, in [0, 1).
    """

    index: BlockIndex
    key_bias: Tensor | None
    bias: Tensor | None
    seed: Tensor
    causal: bool
    scale: float
    dropout_p: float
