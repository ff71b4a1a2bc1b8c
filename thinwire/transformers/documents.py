"""Batches without padding: the documents of a padded batch joined into one row, and attention inside each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

_PREFIX = "thinwire_documents_"


@dataclass(frozen=True)
class Documents:
    """Where the documents of a padded batch [B, S] lie in one row of `tokens` tokens.

    Attributes:
        shape: of the padded batch, (B, S).
        index: of the row's tokens in the batch's B * S, int64 [T], ascending.
        lengths: of the documents that have tokens, in their order.
        tokens: T.
    """

    shape: tuple[int, int]
    index: Tensor
    lengths: list[int]
    tokens: int
    _bands: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, mask: Tensor) -> Documents:
        """Those of a mask [B, S] whose zeros are padding. Waits for a GPU, as sizes depend on the mask."""
        kept = mask.bool()
        index = kept.flatten().nonzero().flatten()
        batch, length = mask.shape
        return cls((batch, length), index, [count for count in kept.sum(dim=1).tolist() if count], len(index))

    def join(self, padded: Tensor) -> Tensor:
        """[B, S, ...] as [1, T, ...], without padding."""
        return padded.flatten(0, 1).index_select(0, self.index)[None]

    def pad(self, joined: Tensor) -> Tensor:
        """[1, T, ...] as [B, S, ...], zeros where padding was."""
        batch, length = self.shape
        padded = joined.new_zeros(batch * length, *joined.shape[2:]).index_copy(0, self.index, joined[0])
        return padded.view(batch, length, *joined.shape[2:])

    def band(self, length: int, window: int | None) -> Tensor | None:
        """The mask [1, 1, length, length] of tokens at most `window` apart; None if that is all of them."""
        if window is None or length <= window + 1:
            return None
        if (length, window) not in self._bands:
            places = torch.arange(length, device=self.index.device)
            self._bands[length, window] = ((places[:, None] - places).abs() <= window)[None, None]
        return self._bands[length, window]


def by_document(implementation: str) -> str:
    """Register attention by document over a registered attention of transformers; the name of it.

    Without documents it is the same attention, masks included.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = _PREFIX + implementation
    ALL_ATTENTION_FUNCTIONS.register(name, partial(_attend, ALL_ATTENTION_FUNCTIONS[implementation]))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    return name


def _attend(
    whole: Callable[..., tuple[Tensor, Any]],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: Documents | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Attention of [1, H, T, D] inside each of the documents, to [1, T, H, D]."""
    if documents is None:
        return whole(module, query, key, value, attention_mask, sliding_window=sliding_window, **kwargs)
    # A split's backward is one concatenation, where that of each slice would fill a tensor of the whole with zeros.
    parts = [torch.split(one, documents.lengths, dim=2) for one in (query, key, value)]
    # Transformers hands on the first distance that is out of sight.
    window = None if sliding_window is None else sliding_window - 1
    masks = [documents.band(length, window) for length in documents.lengths]
    found = [whole(module, *qkv, mask, **kwargs)[0] for *qkv, mask in zip(*parts, masks, strict=True)]
    return torch.cat(found, dim=1), None
